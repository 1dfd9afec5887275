"""Products of groups of rows, each by a matrix of its own, as every target's lowering sees them."""

from __future__ import annotations

from dataclasses import dataclass

from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem

__all__ = ["GroupedProduct"]


@dataclass(frozen=True)
class GroupedProduct(Problem):
    """``rows[s] @ matrices[g]``, where row s is of group g; rows beyond the last group give zeros.

    Attributes:
        rows: [rows, k], those of a group side by side.
        matrices: [groups, k, n].
        ends: [groups], integers: where the rows of each group end. Kernels bring what does not ascend from 0 to the
            number of rows between these bounds, so that no value of it reaches other memory.
    """

    kind = "grouped_matmul"
    operand_names = ("rows", "matrices", "ends")
    dims = (), (0,), (1,)

    rows: Operand
    matrices: Operand
    ends: Operand

    @property
    def groups(self) -> int:
        return self.matrices.shape[0]

    @property
    def m(self) -> int:
        return self.shape[0]

    @property
    def n(self) -> int:
        return self.shape[1]

    @property
    def k(self) -> int:
        return self.rows.shape[1]

    def values(self) -> dict[str, int]:
        """Sizes and strides by the names of kernels' parameters."""
        strides = self.rows.named_strides("a", ("row", "k")) | self.matrices.named_strides("b", ("group", "k", "col"))
        sizes = {"m": self.m, "n": self.n, "k": self.k, "groups": self.groups}
        return sizes | strides | self.ends.named_strides("end", ("step",))

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k
