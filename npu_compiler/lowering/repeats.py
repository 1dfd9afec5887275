"""Groups that differ in nothing but which tensors they are about, as layers of a model do, are lowered once.

A group's form is what is left of it when its tensors, and the checks of its indices, are numbered in the order in which
it names them. Of a form that was lowered before, the steps are taken over: other tensors are bound, other nodes named,
other checks told, and scratch buffers are new.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, get_args

from npu_compiler.artifact.plan import FAULTS, Argument, Call, KernelCall, Step, change_calls, options_of
from npu_compiler.dtypes import DType
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.params import Params
from npu_compiler.lowering.target import Answer, Lowering
from npu_compiler.records import changed
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
        self._known: dict[object, list[_Lowered]] = {}

    def lower(self, groups: Sequence[Group], lower: Lower) -> list[Step]:
        """The steps of one launch's groups: as `lower` gives them, or those of groups of the same form."""
        names = _Names(self._lowering.tensors)
        form = (*[names.form(group) for group in groups], *names.facts, names.order())
        exactly = form, tuple(names.checks)
        known = [*self._known.get(form, []), *self._known.get(exactly, [])]
        for earlier in known:
            buffers = earlier.buffers(names, self._lowering)
            if buffers is not None:
                return earlier.again(names, buffers, self._lowering)
        asked, scratch, answers = self._lowering.asked, len(self._lowering.scratch_sizes), len(self._lowering.answers)
        steps = lower(groups)
        if self._lowering.asked == asked:
            sizes = [self._lowering.scratch_sizes[-1 - i] for i in range(scratch, len(self._lowering.scratch_sizes))]
            made = _Lowered(steps, names, -1 - scratch, sizes, self._lowering.answers[answers:])
            if made.is_general():
                self._known.setdefault(form if made.tells_checks() else exactly, []).append(made)
        return steps


@dataclass(frozen=True)
class _Lowered:
    """What became of groups.

    Attributes:
        steps: Their steps.
        names: The tensors and the names that they have, and the checks.
        scratch: The index of the first scratch buffer that they asked for; further ones lie below.
        sizes: Bytes of each of these.
        answers: What its target was told of the groups ahead.
    """

    steps: Sequence[Step]
    names: _Names
    scratch: int
    sizes: Sequence[int]
    answers: Sequence[Answer]

    def is_general(self) -> bool:
        """Whether steps bind nothing, and say nothing, that others of the same form would not."""
        bound = {argument.buffer for call in self._calls for argument in call.args} - {FAULTS}
        own = {*self.names.numbers, *(self.scratch - i for i in range(len(self.sizes)))}
        own |= {answer.answer for answer in self.answers if answer.is_buffer}
        rest = "".join(word for words in self._words.values() for word in words if isinstance(word, str))
        named = any(name in rest for name in self.names.names)
        return own.issuperset(bound) and own.issuperset(answer.buffer for answer in self.answers) and not named

    def tells_checks(self) -> bool:
        """Whether all numbers of checks that its kernels are given are known to be that, so that others may take their
        place.
        """
        given = [getattr(call, "params", b"") for call in self._calls if any(a.buffer == FAULTS for a in call.args)]
        known = {check + 1 for check in self.names.checks}
        return all(isinstance(params, Params) and known.issuperset(params.checks.values()) for params in given)

    @cached_property
    def _calls(self) -> list[Call]:
        return [call for step in self.steps for option in options_of(step) for call in option.calls]

    @cached_property
    def _words(self) -> dict[str, list[str | int]]:
        """What each call's label is made of: numbers of groups, by whose nodes launches are called, and other text."""
        numbers = {label: number for number, label in enumerate(self.names.labels)}
        ways = "|".join(re.escape(label) for label in sorted(numbers, key=len, reverse=True) if label)
        pattern = re.compile(f"(?<![^ ])({ways})(?![^ ;])")  # every other part of what this splits is a group's label
        labels = {call.label for call in self._calls}
        parts = {label: pattern.split(label) if ways else [label] for label in labels}
        return {
            label: [numbers[part] if place % 2 else part for place, part in enumerate(found) if part]
            for label, found in parts.items()
        }

    def buffers(self, names: _Names, lowering: Lowering) -> dict[int, int] | None:
        """What other groups of the same form have in the place of tensors and of what several groups share; None where
        their target would be told something else.
        """
        if self.names.equal_labels() != names.equal_labels():
            return None
        buffers = dict(zip(self.names.numbers, names.numbers, strict=True))
        for told in self.answers:
            answer = told.question(buffers[told.buffer], lowering)
            if answer is None or not (told.is_buffer or answer == told.answer):
                return None
            if told.is_buffer:
                buffers[told.answer] = answer
        return buffers

    def again(self, names: _Names, buffers: dict[int, int], lowering: Lowering) -> list[Step]:
        """The steps of other groups of the same form, whose `buffers` these are."""
        buffers |= {self.scratch - i: lowering.scratch(nbytes) for i, nbytes in enumerate(self.sizes)}
        buffers[FAULTS] = FAULTS
        checks = {own + 1: other + 1 for own, other in zip(self.names.checks, names.checks, strict=True)}
        labels = {
            label: "".join([word if isinstance(word, str) else names.labels[word] for word in words])
            for label, words in self._words.items()
        }
        change = partial(self._changed, buffers=buffers, labels=labels, checks=checks)
        return [change_calls(step, change) for step in self.steps]

    def _changed(
        self, call: Call, buffers: Mapping[int, int], labels: Mapping[str, str], checks: Mapping[int, int]
    ) -> Call:
        args = tuple([Argument(buffers[a.buffer], a.offset, a.writes, a.extension) for a in call.args])
        label = labels[call.label]
        if isinstance(call, KernelCall) and isinstance(call.params, Params):
            return changed(call, label=label, args=args, params=call.params.renumbered(checks))
        return changed(call, label=label, args=args)


class _Names:
    """The tensors that a form names, numbered as they come.

    Attributes:
        numbers: By a tensor's index.
        checks: The numbers of the index checks, by their own.
        labels: What launches of each group are called, perhaps with other words around that: by its nodes.
        names: What tensors and nodes are called.
        facts: Of each numbered tensor, what a target may know of it.
    """

    def __init__(self, tensors: Sequence[TracedTensor]) -> None:
        self._tensors = tensors
        self.numbers: dict[int, int] = {}
        self.checks: dict[int, int] = {}
        self.labels: list[str] = []
        self.names: set[str] = set()
        self.facts: list[object] = []

    def order(self) -> tuple[int, ...]:
        """The numbers in the order of the indices, by which kernels bind some of their tensors."""
        return tuple([self.numbers[index] for index in sorted(self.numbers)])

    def equal_labels(self) -> list[int]:
        """For each group the first that is called the same."""
        return [self.labels.index(label) for label in self.labels]

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
            if _PLAIN.issuperset(map(type, value)):
                return value
            return tuple([self.form(item) for item in value])
        if kind is float or kind is bool:
            return kind, repr(value)  # 1, 1.0 and True are equal in Python, and so are 0.0 and -0.0
        if kind is Group:
            self.names.update(value.nodes)
            self.labels.append(" + ".join(value.nodes))
        fields_of = _telling_fields(kind)
        return object() if fields_of is None else (kind, *map(self.form, fields_of(value)))

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
                check = self.checks.setdefault(node.check, len(self.checks))
                rest = node.elements, node.extent, node.otherwise, check, node.dtype
                yield places[node.index], places[node.element], *rest
            else:
                yield node  # it names no tensor


_PLAIN = frozenset({int, str, type(None), DType, View, Layout, Combination})
_EXPRESSIONS = frozenset(get_args(Expr))


@cache
def _telling_fields(kind: type) -> Callable[[Any], Sequence[Any]] | None:
    """Gives the fields of a dataclass that tell its values apart, not what nodes are called; None for what is none."""
    if not is_dataclass(kind):
        return None
    names = [each.name for each in fields(kind) if (kind, each.name) != (Group, "nodes")]
    return attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]
