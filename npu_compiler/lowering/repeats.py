"""Groups that differ in nothing but which tensors they are about, as layers of a model do, are lowered once.

A group's form is what is left of it when its tensors are numbered in the order in which it names them. Of a form that
was lowered before, the steps are taken over: other tensors are bound, other nodes named, and scratch buffers are new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from typing import Any, get_args

from npu_compiler.artifact.plan import FAULTS, Argument, Call, Step, change_calls, options_of
from npu_compiler.dtypes import DType
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.target import Lowering
from npu_compiler.tensor.expr import Call as FunctionCall
from npu_compiler.tensor.expr import Checked, Combination, Expr, Load, Reduce, Ref, walk
from npu_compiler.tensor.layout import Layout
from npu_compiler.tensor.trace import Anchor, Scatter, TracedTensor
from npu_compiler.tensor.view import View

__all__ = ["Repeats"]

Lower = Callable[[Sequence[Group]], list[Step]]


class Repeats:
    """What was lowered so far in a function."""

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self._known: dict[object, _Lowered] = {}

    def lower(self, groups: Sequence[Group], lower: Lower) -> list[Step]:
        """The steps of one launch's groups: as `lower` gives them, or those of groups of the same form."""
        names = _Names(self._lowering.tensors)
        key = (*[names.form(group) for group in groups], *names.facts, names.order())
        earlier = self._known.get(key)
        if earlier is not None:
            return earlier.again(names, _label(groups), self._lowering)
        asked, scratch = self._lowering.asked, len(self._lowering.scratch_sizes)
        steps = lower(groups)
        if self._lowering.asked == asked:
            sizes = [self._lowering.scratch_sizes[-1 - i] for i in range(scratch, len(self._lowering.scratch_sizes))]
            made = _Lowered(steps, names, _label(groups), -1 - scratch, sizes)
            if made.is_general():
                self._known[key] = made
        return steps


def _label(groups: Sequence[Group]) -> str:
    """What launches of groups are called: by their nodes, perhaps with other words around that."""
    return "; ".join(" + ".join(group.nodes) for group in groups)


@dataclass(frozen=True)
class _Lowered:
    """What became of groups.

    Attributes:
        steps: Their steps.
        names: The tensors and the names that they have.
        label: What their launches are called.
        scratch: The index of the first scratch buffer that they asked for; further ones lie below.
        sizes: Bytes of each of these.
    """

    steps: Sequence[Step]
    names: _Names
    label: str
    scratch: int
    sizes: Sequence[int]

    def is_general(self) -> bool:
        """Whether steps bind nothing, and say nothing, that others of the same form would not."""
        calls = [call for step in self.steps for option in options_of(step) for call in option.calls]
        bound = {argument.buffer for call in calls for argument in call.args} - {FAULTS}
        own = {self.scratch - i for i in range(len(self.sizes))}
        rest = [call.label.replace(self.label, "") for call in {call.label: call for call in calls}.values()]
        named = any(name in text for text in rest if text for name in self.names.names)
        return bound <= own.union(self.names.numbers) and not named

    def again(self, names: _Names, label: str, lowering: Lowering) -> list[Step]:
        """The steps of other groups of the same form."""
        buffers = dict(zip(self.names.numbers, names.numbers, strict=True))
        buffers |= {self.scratch - i: lowering.scratch(nbytes) for i, nbytes in enumerate(self.sizes)}
        buffers[FAULTS] = FAULTS
        change = partial(self._changed, buffers=buffers, label=label)
        return [change_calls(step, change) for step in self.steps]

    def _changed(self, call: Call, buffers: Mapping[int, int], label: str) -> Call:
        args = tuple([Argument(buffers[a.buffer], a.offset, a.writes, a.extension) for a in call.args])
        return replace(call, label=call.label.replace(self.label, label), args=args)


class _Names:
    """The tensors that a form names, numbered as they come.

    Attributes:
        numbers: By a tensor's index.
        names: What tensors and nodes are called.
        facts: Of each numbered tensor, what a target may know of it.
    """

    def __init__(self, tensors: Sequence[TracedTensor]) -> None:
        self._tensors = tensors
        self.numbers: dict[int, int] = {}
        self.names: set[str] = set()
        self.facts: list[object] = []

    def order(self) -> tuple[int, ...]:
        """The numbers in the order of the indices, by which kernels bind some of their tensors."""
        return tuple([self.numbers[index] for index in sorted(self.numbers)])

    def form(self, value: Any) -> object:
        """What is left of a value of a group when its tensors are numbered; equal to no other where that is unknown."""
        kind: Any = type(value)
        if kind in _PLAIN:
            return value
        if kind in _EXPRESSIONS:
            return tuple(self._expression(value))
        if kind is Ref:
            return self._number(value.tensor), value.view, value.steps
        if kind is TracedTensor:
            number = self._number(value.index)
            return number if value is self._tensors[value.index] else (number, self._facts(value))
        if kind is tuple:
            return tuple([self.form(item) for item in value])
        if kind is float or kind is bool:
            return kind, repr(value)  # 1, 1.0 and True are equal in Python, and so are 0.0 and -0.0
        if kind is Group:
            self.names.update(value.nodes)
        names = _field_names(kind)
        return object() if names is None else (kind, *[self.form(getattr(value, name)) for name in names])

    def _number(self, index: int) -> int:
        number = self.numbers.get(index)
        if number is None:
            number = self.numbers[index] = len(self.numbers)
            self.names.add(self._tensors[index].name)
            self.facts.append(self._facts(self._tensors[index]))
        return number

    def _facts(self, tensor: TracedTensor) -> object:
        source = tensor.source
        kind: object = source.kind if isinstance(source, Anchor) else type(source)
        if isinstance(source, Scatter):
            kind = kind, self._number(source.into.tensor), source.into.view
        return tensor.dtype, tensor.shape, tensor.layout, tensor.role, kind

    def _expression(self, expr: Expr) -> Iterator[object]:
        """Each of its nodes; operands go by their places."""
        places: dict[Expr, int] = {}
        for node in walk(expr):
            places[node] = len(places)
            if isinstance(node, FunctionCall):
                yield node.fn, node.dtype, *[places[arg] for arg in node.args]
            elif isinstance(node, Load):
                index = None if node.index is None else places[node.index]
                yield self.form(node.ref), node.dtype, index, node.index_stride
            elif isinstance(node, Reduce):
                yield node.combination, node.dtype, node.extent, node.item, *[places[arg] for arg in node.args]
            elif isinstance(node, Checked):
                rest = node.elements, node.extent, node.otherwise, node.check, node.dtype
                yield places[node.index], places[node.element], *rest
            else:
                yield node  # it names no tensor


_PLAIN = frozenset({int, str, type(None), DType, View, Layout, Combination})
_EXPRESSIONS = frozenset(get_args(Expr))


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass that tell its values apart, but for what nodes are called; None for what is none."""
    if not is_dataclass(kind):
        return None
    return tuple(each.name for each in fields(kind) if (kind, each.name) != (Group, "nodes"))
