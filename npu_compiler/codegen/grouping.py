"""Fusion by derivation: which traced tensors become kernels, and what each kernel computes.

An elementwise tensor that one other elementwise tensor reads is computed there, in registers. One that follows a
matmul, a convolution or a pooling becomes its epilogue. Reductions over the last dimension stay inside the kernel of
whoever reads their result row by row. No fused kernel is listed anywhere: RMSNorm, softmax or add+ReLU are what these
rules give.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from npu_compiler.expr import Call, Expr, Load, Reduce, Ref, has_reduce, leaves, reindex, substitute, walk
from npu_compiler.trace import Anchor, Map, Trace, TracedTensor
from npu_compiler.view import View

__all__ = ["Group", "group"]

_CHEAP_CALLS = frozenset(
    {"add", "sub", "mul", "neg", "cast", "where", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"}
)
_MAX_CHEAP_CALLS = 6


@dataclass(frozen=True)
class Group:
    """One kernel's work.

    Attributes:
        output: The tensor it stores.
        anchor: The matmul, convolution or pooling it contains, if any.
        expr: The value stored at each position of `shape`; a load of the anchor's tensor is the anchor's own result.
        shape: The iteration space: the anchor's shape, or the output's.
        view: Where the output lies, over `shape`.
        nodes: Names of the IR's nodes it covers.
    """

    output: TracedTensor
    anchor: TracedTensor | None
    expr: Expr
    shape: tuple[int, ...]
    view: View
    nodes: tuple[str, ...]

    def reads(self) -> Iterable[int]:
        """Indices of the tensors it reads from memory."""
        if self.anchor is not None and isinstance(self.anchor.source, Anchor):
            yield from (ref.tensor for ref in self.anchor.source.operands)
        own = self.anchor.index if self.anchor is not None else -1
        yield from (load.ref.tensor for load in leaves(self.expr) if load.ref.tensor != own)


def group(trace: Trace, outputs: Iterable[int]) -> list[Group]:
    """Groups a trace into kernels, in an order in which each reads only what is already there.

    Args:
        trace: The traced graph.
        outputs: Indices of the tensors that must end up in memory.
    """
    groups = _Grouping(trace, set(outputs)).run()
    return _in_order(groups, set(outputs))


@dataclass(frozen=True)
class _Value:
    """What a tensor is made of, so far: over its own shape, or over its anchor's if it has one."""

    expr: Expr
    anchor: TracedTensor | None
    nodes: tuple[str, ...]


class _Grouping:
    def __init__(self, trace: Trace, outputs: set[int]) -> None:
        self.tensors = trace.tensors
        self.outputs = outputs
        self.users: dict[int, set[int]] = {}
        for tensor in self.tensors:
            for ref in tensor.operands():
                self.users.setdefault(ref.tensor, set()).add(tensor.index)
        self.values: dict[int, _Value] = {}

    def run(self) -> dict[int, Group]:
        for tensor in self.tensors:
            if isinstance(tensor.source, Map):
                self.values[tensor.index] = self._absorb(tensor, tensor.source.expr)
            elif isinstance(tensor.source, Anchor):
                itself = Load(Ref(tensor.index, tensor.view), tensor.dtype)
                self.values[tensor.index] = _Value(itself, tensor, (tensor.name,))
        return {index: self._as_group(self.tensors[index], value) for index, value in self.values.items()}

    def _absorb(self, tensor: TracedTensor, expr: Expr) -> _Value:
        """Takes into `tensor` whatever of its operands need not be stored."""
        nodes: list[str] = []
        inlined: dict[int, Expr] = {}
        for load in list(leaves(expr)):
            producer = self.tensors[load.ref.tensor]
            if (
                isinstance(producer.source, Map)
                and self.values[producer.index].anchor is None
                and self._may_inline(producer)
            ):
                replacement = self._inline(load, producer, tensor)
                if replacement is not None:
                    inlined[id(load)] = replacement
                    nodes += [n for n in self.values[producer.index].nodes if n not in nodes]
        if inlined:
            expr = _replace_loads(expr, inlined)
        value = _Value(expr, None, tuple(dict.fromkeys((*nodes, tensor.name))))
        return self._as_epilogue(tensor, value) or value

    def _may_inline(self, producer: TracedTensor) -> bool:
        """Whether a tensor may be computed where it is read instead of being stored."""
        users = self.users.get(producer.index, set())
        if producer.index in self.outputs or any(not isinstance(self.tensors[u].source, Map) for u in users):
            return False
        return len(users) == 1 or _is_cheap(self.values[producer.index].expr)

    def _inline(self, load: Load, producer: TracedTensor, consumer: TracedTensor) -> Expr | None:
        """The producer's expression at the consumer's positions, or None where it must be stored."""
        expr = self.values[producer.index].expr
        if load.index is not None:
            return None
        whole = load.ref.view.same_elements(producer.view)
        if not has_reduce(expr):
            return expr if whole else reindex(expr, producer.shape, load.ref.steps)
        same_rows = _without_ones(producer.shape[:-1]) == _without_ones(consumer.shape[:-1])
        aligned = load.ref.view.shape[:-1] == consumer.shape[:-1] or (
            whole and producer.shape[:-1] == consumer.shape[:-1]
        )
        rows_only = producer.shape[-1] == 1 and prod(load.ref.view.shape) == prod(producer.shape)
        if not (same_rows and aligned):
            return None
        if whole and len(producer.shape) == len(consumer.shape):
            return expr
        if rows_only and _keeps_rows(load.ref, producer):
            return _realign(expr, producer.shape[:-1], consumer.shape[:-1])
        return None

    def _as_epilogue(self, tensor: TracedTensor, value: _Value) -> _Value | None:
        """`value` as the epilogue of the latest anchor among its operands, if it can be one."""
        if has_reduce(value.expr):
            return None
        candidates = []
        for load in leaves(value.expr):
            producer = self.values.get(load.ref.tensor)
            alone = self.users.get(load.ref.tensor, set()) == {tensor.index} and load.ref.tensor not in self.outputs
            if producer is not None and producer.anchor is not None and alone and load.index is None:
                candidates.append((producer.anchor.index, load.ref.tensor))
        for _, index in sorted(candidates, reverse=True):
            epilogue = self._onto_anchor(tensor, value, index)
            if epilogue is not None:
                return epilogue
        return None

    def _onto_anchor(self, tensor: TracedTensor, value: _Value, index: int) -> _Value | None:
        """`value` over the iteration space of the anchor behind the operand `index`, if each reads its own position."""
        operand, made = self.tensors[index], self.values[index]
        anchor = made.anchor
        assert anchor is not None
        if prod(tensor.shape) != prod(anchor.shape) or tensor.view.reshape(anchor.shape) is None:
            return None
        steps = () if tensor.shape == anchor.shape else (("reshape", anchor.shape),)
        expr = reindex(value.expr, tensor.shape, steps)
        own = operand.view.reshape(anchor.shape)
        if expr is None or own is None:
            return None
        loads = [load for load in leaves(expr) if load.ref.tensor == index]
        if any(load.index is not None or not load.ref.view.same_elements(own) for load in loads):
            return None
        expr = _replace_loads(expr, {id(load): made.expr for load in loads})
        return _Value(expr, anchor, tuple(dict.fromkeys((*made.nodes, *value.nodes))))

    def _as_group(self, tensor: TracedTensor, value: _Value) -> Group:
        if value.anchor is None:
            return Group(tensor, None, value.expr, tensor.shape, tensor.view, value.nodes)
        view = tensor.view.reshape(value.anchor.shape)
        assert view is not None
        return Group(tensor, value.anchor, value.expr, value.anchor.shape, view, value.nodes)


def _is_cheap(expr: Expr) -> bool:
    """Whether computing a value again for each reader costs less than storing and loading it."""
    calls = loads = 0
    for node in walk(expr):
        if isinstance(node, Reduce) or (isinstance(node, Call) and node.fn not in _CHEAP_CALLS):
            return False
        calls += isinstance(node, Call)
        loads += isinstance(node, Load)
    return loads <= 1 and calls <= _MAX_CHEAP_CALLS


def _replace_loads(expr: Expr, replacements: dict[int, Expr]) -> Expr:
    return substitute(expr, lambda node: replacements.get(id(node)))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _keeps_rows(ref: Ref, producer: TracedTensor) -> bool:
    """Whether a reference to one value a row reads the rows in order, whatever the dimensions of size 1."""
    read = [(n, s) for n, s in zip(ref.view.shape, ref.view.strides, strict=True) if n != 1]
    own = [(n, s) for n, s in zip(producer.view.shape, producer.view.strides, strict=True) if n != 1]
    return read == own and ref.view.offset == 0


def _realign(expr: Expr, old: tuple[int, ...], new: tuple[int, ...]) -> Expr:
    """A reducing expression over rows `old` as one over rows `new`, which differ in dimensions of size 1 only."""

    def rewrite(node: Expr) -> Expr | None:
        if not isinstance(node, Load):
            return None
        width = node.ref.view.shape[-1] if node.ref.view.shape else 1
        ref: Ref | None = node.ref.apply(("expand", (*old, width)))
        ref = ref.apply(("reshape", (*new, width))) if ref is not None else None
        return node if ref is None else replace(node, ref=ref)

    return expr if old == new else substitute(expr, rewrite)


def _in_order(groups: dict[int, Group], outputs: set[int]) -> list[Group]:
    """The groups that the outputs need, each after those whose result it reads."""
    ordered: list[Group] = []
    done: set[int] = set()
    stack = [(index, False) for index in sorted(outputs, reverse=True) if index in groups]
    while stack:
        index, ready = stack.pop()
        if index in done:
            continue
        if ready:
            done.add(index)
            ordered.append(groups[index])
            continue
        stack.append((index, True))
        pending = sorted({i for i in groups[index].reads() if i in groups and i not in done}, reverse=True)
        stack.extend((i, False) for i in pending)
    return ordered
