"""The expression of a tensor while grouping still adds to it, and how much one kernel may compute and read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from npu_compiler.tensor.expr import Call, Expr, Reduce, leaves, walk
from npu_compiler.tensor.trace import TracedTensor

__all__ = ["MAX_READS", "Value"]

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
        pairs: See `grouping.Group`.
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
        return replace(self, nodes=nodes, reads=reads, work=work, reductions=reductions)
