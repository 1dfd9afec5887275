"""Matrix products, as every target's lowering sees them before it divides the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Self

from npu_compiler.artifact.plan import Argument
from npu_compiler.dtypes import DType
from npu_compiler.lowering.problems.operand import Operand, are_chunks
from npu_compiler.lowering.problems.problem import Dims, Problem
from npu_compiler.tensor.trace import Anchor, TracedTensor
from npu_compiler.tensor.view import collapse

__all__ = ["Matrix", "Product"]


@dataclass(frozen=True)
class Matrix:
    """An operand of a product, seen as [along, k] for each position of the merged batch.

    Attributes:
        operand: The tensor.
        along, k: Elements from one row of `a`, or column of `b`, to the next, and from one k to the next.
        batch: Elements from one position of each merged batch dimension to the next.
    """

    operand: Operand
    along: int
    k: int
    batch: tuple[int, ...]

    @classmethod
    def of(cls, operand: Operand, dims: tuple[int, int], batch: tuple[int, ...]) -> Matrix:
        """An operand; a dimension of one element has no stride of its own and takes whichever suits."""
        along, k = (operand.strides[dim] for dim in dims)
        if operand.shape[dims[1]] == 1 and along != 1:
            k = 1
        if operand.shape[dims[0]] == 1 and k == 1:
            along = 0
        return cls(operand, along, k, batch)

    @property
    def dtype(self) -> DType:
        return self.operand.dtype

    @property
    def offset(self) -> int:
        """Of the first element, in elements."""
        return self.operand.offset

    @property
    def argument(self) -> Argument:
        return self.operand.argument

    @property
    def is_constant(self) -> bool:
        """Whether no kernel of the plan writes it."""
        return self.operand.is_constant

    def across(self, along_k: bool) -> tuple[int, ...]:
        """Where runs of neighbours begin, along k or along the other dimension: the offset and all other strides."""
        return (self.offset, self.along if along_k else self.k, *self.batch)

    def has_chunks(self, count: int, extent: int, along_k: bool) -> bool:
        """Whether `count` neighbours can be read at once, along k or along the other dimension, of so many elements."""
        return are_chunks(count, self.k if along_k else self.along, (*self.across(along_k), extent))


@dataclass(frozen=True)
class Product(Problem):
    """``a @ b``: [m, k] by [k, n] for each position of the merged batch dimensions.

    Attributes:
        a, b: The operands.
        m, n, k: Rows, columns and products that each result sums.
        batch: The batch dimensions, merged where both operands allow.
    """

    kind = "matmul"

    a: Matrix
    b: Matrix
    m: int
    n: int
    k: int
    batch: tuple[int, ...]

    @classmethod
    def of(cls, result: TracedTensor, anchor: Anchor, operands: Sequence[Operand]) -> Self:
        """The problem that an anchor poses."""
        return cls._posed(result, *operands)

    @classmethod
    def _posed(cls, result: TracedTensor, left: Operand, right: Operand) -> Self:
        *outer, m, n = result.shape
        batch, (a_batch, b_batch) = collapse(tuple(outer), [left.strides[:-2], right.strides[:-2]])
        a, b = Matrix.of(left, (-2, -1), a_batch), Matrix.of(right, (-1, -2), b_batch)
        return cls(result, a, b, m, n, left.shape[-1], batch)

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        return self.a.operand, self.b.operand

    def with_operand(self, position: int, operand: Operand) -> Self:
        operands = [*self.operands]
        operands[position] = operand
        return self._posed(self.result, *operands)

    @property
    def dims(self) -> Dims:
        rank = len(self.shape)
        return range(rank - 2), (rank - 2,), (rank - 1,)

    @property
    def batches(self) -> int:
        """Products of matrices."""
        return prod(self.batch)

    def values(self) -> dict[str, int]:
        """Sizes and strides by the names of kernels' parameters."""
        strides = {"a_row": self.a.along, "a_k": self.a.k, "b_k": self.b.k, "b_col": self.b.along}
        return {"m": self.m, "n": self.n, "k": self.k, **strides}

    @property
    def flops(self) -> int:
        return 2 * self.batches * self.m * self.n * self.k
