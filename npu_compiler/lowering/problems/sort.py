"""Sorting, as every target's lowering sees it before it divides the work."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from npu_compiler.dtypes import INT64
from npu_compiler.integers import power_of_two
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem

__all__ = ["Sort"]


@dataclass(frozen=True)
class Sort(Problem):
    """The places of the first elements of each row, in order: int32 [outer, inner, count].

    NaN is the greatest number, and equal to itself; negative zero equals zero. Of equal elements the one ahead comes
    first, whatever the direction.

    Attributes:
        source: [outer, inner, length].
        descending: Whether the greatest comes first.
    """

    kind = "sort"
    operand_names = ("source",)
    dims = (0,), (1,), (2,)

    source: Operand
    descending: bool

    @property
    def rows(self) -> int:
        return prod(self.shape[:2])

    @property
    def inner(self) -> int:
        return self.shape[1]

    @property
    def length(self) -> int:
        return self.source.shape[2]

    @property
    def count(self) -> int:
        """How many places of each row are wanted."""
        return self.shape[2]

    @property
    def run(self) -> int:
        """What kernels keep of elements in order: a power of two that holds all that is wanted."""
        return power_of_two(self.count)

    @property
    def is_wide(self) -> bool:
        """Whether elements have 64 bits."""
        return self.source.dtype == INT64

    @property
    def flops(self) -> int:
        """Comparisons of a merge sort that keeps no more than it needs."""
        return prod(self.source.shape) * max(2, self.run).bit_length()
