"""Scans, such as running sums, as every target's lowering sees them before it divides the work."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from npu_compiler.lowering.loops import flops_of
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.tensor.expr import Combination, Expr

__all__ = ["Scan"]


@dataclass(frozen=True)
class Scan(Problem):
    """What a reduction gives for each element with all ahead of it, along the middle one of three dimensions.

    Attributes:
        source: [outer, length, inner].
        combination: How two states become one.
        lift: Each number of an element's own state, over two slots: the element, and its position along the dimension.
        value: The result, over the numbers of the state of an element and all ahead of it.
    """

    kind = "scan"
    operand_names = ("source",)
    dims = (0,), (1,), (2,)

    source: Operand
    combination: Combination
    lift: tuple[Expr, ...]
    value: Expr

    @property
    def columns(self) -> int:
        """Scans that know nothing of each other."""
        return self.shape[0] * self.shape[2]

    @property
    def length(self) -> int:
        return self.shape[1]

    @property
    def flops(self) -> int:
        return flops_of((*self.combination.values, *self.lift, self.value), prod(self.shape))
