"""Running sums, products and extrema along a dimension."""

from __future__ import annotations

from functools import partial
from typing import Any

from npu_compiler.dtypes import BOOL, INT32, INT64
from npu_compiler.ops.reduction import accumulator, exponentials, first, greatest, least, product, total, with_place
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import apart_from_dim
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.reducing import Reduction, State, highest, lowest, reduction, scan
from npu_compiler.tensor.symbolic import OpRefusal, Tensor

_scan_op = partial(op, work=Work.ANCHOR, rows=apart_from_dim)


def _place(value: Tensor, place: Tensor) -> State:
    return (place,)


_extremum = partial(reduction, lift=with_place, finish=_place)


@_extremum(lowest, 0)
def last_greatest(a: State, b: State) -> State:
    return first("gt", a, b, latest=True)


@_extremum(highest, 0)
def last_least(a: State, b: State) -> State:
    return first("lt", a, b, latest=True)


@_scan_op("aten.cumsum.default", "aten.cumsum_.default")
def cumsum(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """The sum of each element and all ahead of it along `dim`. Integers and booleans add up in int64."""
    return scan(self, total, dim, accumulator(self, dtype))


@_scan_op("aten.cumprod.default", "aten.cumprod_.default")
def cumprod(self: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """The product of each element and all ahead of it along `dim`. Integers and booleans multiply in int64."""
    return scan(self, product, dim, accumulator(self, dtype))


@_scan_op("aten.cummax.default")
def cummax(self: Tensor, dim: int) -> State:
    """The maximum of each element and all ahead of it along `dim`, and where it was last; NaN stays."""
    return _running(self, dim, greatest, last_greatest)


@_scan_op("aten.cummin.default")
def cummin(self: Tensor, dim: int) -> State:
    """The minimum of each element and all ahead of it along `dim`, and where it was last; NaN stays."""
    return _running(self, dim, least, last_least)


def _running(x: Tensor, dim: int, value: Reduction, place: Reduction) -> State:
    ordered = x.cast(INT32) if x.dtype == BOOL else x
    return scan(ordered, value, dim).cast(x.dtype), scan(ordered, place, dim).cast(INT64)


@_scan_op("aten.logcumsumexp.default")
def logcumsumexp(self: Tensor, dim: int) -> Tensor:
    """The logarithm of the sum of ``e ** self`` over each element and all ahead of it along `dim`."""
    if not self.dtype.is_float:
        raise OpRefusal(f"given {self.dtype}, expected floating point")
    return scan(self, exponentials, dim)
