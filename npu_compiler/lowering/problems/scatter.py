"""Rows that are combined where an index says, as every target's lowering sees it before it divides the work."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from npu_compiler.lowering.dialect import Dialect
from npu_compiler.lowering.problems.operand import Operand, named_strides
from npu_compiler.lowering.problems.problem import Problem

__all__ = ["ScatterRows"]

_NEUTRAL = {"prod": 1.0, "amax": float("-inf"), "amin": float("inf")}


@dataclass(frozen=True)
class ScatterRows(Problem):
    """Each row of a result is a row of `base` with those rows of `values` combined whose index names it.

    Attributes:
        index: [count], int32, the row of each of `values`; what names no row is for none.
        values: [outer, count, inner].
        how: ``sum``, ``mean``, ``prod``, ``amax`` or ``amin``.
        include_self: Whether a row of `base` that is named counts among what is combined.
        fill: The value of a base that is in no memory.
        base: [outer, rows, inner]; None where all of it is `fill`.
    """

    kind = "scatter_rows"
    operand_names = ("index", "values", "base")
    dims = (0,), (1,), (2,)

    index: Operand
    values: Operand
    how: str
    include_self: bool
    fill: float
    base: Operand | None = None

    @property
    def count(self) -> int:
        """Rows of values."""
        return self.index.shape[0]

    @property
    def flops(self) -> int:
        return prod(self.values.shape)

    def macros(self, dialect: Dialect) -> dict[str, object]:
        """What kernels in a language are told of how values are combined, but for by what function."""
        return {
            "NEUTRAL": dialect.literal(_NEUTRAL.get(self.how, 0.0), self.result.dtype),
            "MEAN": int(self.how == "mean"),
            "INCLUDED": int(self.include_self),
            "HAS_BASE": int(self.base is not None),
            "FILL": dialect.literal(self.fill, self.result.dtype),
        }

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes, and where rows lie, by the names of kernels' parameters."""
        (_, rows, width), along = self.shape, ("outer", "row", "column")
        sizes = {"rows": rows, "width": width, "count": self.count, "index_step": self.index.strides[0]}
        return {**sizes, **named_strides(self.base, "base", along), **self.values.named_strides("values", along)}
