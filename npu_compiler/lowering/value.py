"""The expression of a tensor while grouping still adds to it, and how much one kernel may compute and read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from npu_compiler.records import changed
from npu_compiler.tensor.expr import Call, Expr, Load, Reduce, leaves, walk
from npu_compiler.tensor.trace import TracedTensor

__all__ = ["MAX_READS", "Value", "is_cheap"]

_CHEAP_CALLS = frozenset(
    {"add", "sub", "mul", "neg", "cast", "where", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not"}
)
_MAX_CHEAP_CALLS = 12

_MAX_WORK = 192
"""Operations on an element beyond which a kernel's arithmetic takes longer than to store the element and load it again,
on every device; a longer chain is several kernels."""
_BRANCH_WORK = 6  # what a choice counts as: its sides may become branches, which nest
MAX_READS = 28
"""Tensors that a kernel reads: Metal binds 31 buffers, of which the result and the parameters are two."""


@dataclass(frozen=True)
class Value:
    """The expression that computes a tensor, as far as grouping has come.

    Attributes:
        expr: The value at each position of `shape`.
        shape: The tensor's shape; with an anchor the anchor's shape; the tensor's shape and a last dimension of 1 where
            each element is the result of a row.
        nodes: Names of the IR's nodes it covers.
        reads: Tensors that computing it loads.
        work: Operations for one element; one that several others use counts once for each of them.
        reductions: Reductions, counted in the same way; each is one more loop over the row, which computes its elements
            again.
        anchor: The matmul, convolution, pooling or attention that it follows.
        pairs: Neighbouring columns of its anchor that each element combines.
        index: For a scatter, where each value goes.
        most_reads: The most tensors that it may load when grouping is done.
    """

    expr: Expr
    shape: tuple[int, ...]
    nodes: tuple[str, ...]
    reads: frozenset[int]
    work: int = 0
    reductions: int = 0
    anchor: TracedTensor | None = None
    pairs: int = 1
    index: Expr | None = None
    most_reads: int = MAX_READS

    @classmethod
    def of(cls, expr: Expr, shape: tuple[int, ...], most_reads: int = MAX_READS) -> Value:
        """The value of an expression, with its operations, reductions and loads counted; `nodes` is empty."""
        nodes = walk(expr)
        branches = sum(isinstance(node, Call) and node.fn == "where" for node in nodes)
        work = sum(isinstance(node, Call) for node in nodes) + branches * (_BRANCH_WORK - 1)
        reductions = sum(isinstance(node, Reduce) for node in nodes)
        reads = frozenset(load.ref.tensor for load in leaves(expr))
        return cls(expr, shape, (), reads, work, reductions, most_reads=most_reads)

    @property
    def is_full(self) -> bool:
        """Whether it loads more tensors than it may as it stands, so that nothing can be computed with it."""
        return len(self.reads) > self.most_reads

    def with_made(self, index: int, made: Value, times: int = 1) -> Value | None:
        """This value's counts if it computes the tensor `index` instead of loading it; `expr` is unchanged.

        Args:
            index: A tensor that it loads.
            made: What computes that tensor.
            times: How often it is computed for one element.

        Returns:
            The value, or None where one kernel would compute or load too much.
        """
        reads = (self.reads - {index}) | made.reads
        work, reductions = self.work + times * made.work, self.reductions + times * made.reductions
        if work * (1 + reductions) > _MAX_WORK or len(reads) > self.most_reads:
            return None
        nodes = tuple(dict.fromkeys((*self.nodes, *made.nodes)))
        return changed(self, nodes=nodes, reads=reads, work=work, reductions=reductions)


def is_cheap(expr: Expr, tensors: Sequence[TracedTensor], elements: int) -> bool:
    """Whether computing a value of so many elements again for each reader costs less than storing and loading it.

    That is so for a few simple operations on no more elements than the value has itself.
    """
    calls = 0
    inside_index: set[Load] = set()
    loads: list[Load] = []
    for node in walk(expr):
        if isinstance(node, Reduce) or (isinstance(node, Call) and node.fn not in _CHEAP_CALLS):
            return False
        calls += isinstance(node, Call)
        if isinstance(node, Load):
            loads.append(node)
            if node.index is not None:
                inside_index.update(leaves(node.index))
    read: dict[int, int] = {}
    for load in loads:
        if load not in inside_index:
            view = load.ref.view
            distinct = prod(n for n, stride in zip(view.shape, view.strides, strict=True) if stride)
            read[load.ref.tensor] = read.get(load.ref.tensor, 0) + distinct
    total = sum(min(count, prod(tensors[index].shape)) for index, count in read.items())
    return total <= elements and calls <= _MAX_CHEAP_CALLS
