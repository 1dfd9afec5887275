"""Sums, products, means, extrema and their places over some dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from npu_compiler.dtypes import BOOL, FLOAT32, INT32, INT64, UINT8, DType, dtype
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import Passage, RowCall
from npu_compiler.ops.traits import Term, Work
from npu_compiler.tensor.reducing import State, highest, lowest, reduce, reduction
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, apply, arange, full, where


def _rows_kept(call: RowCall) -> Passage | None:
    """Rows of what is left, where the op names what it reduces."""
    dim, rank = call.node.attrs.get("dim"), len(call.shape("self"))
    reduced = {int(d) % rank for d in ([dim] if isinstance(dim, int) else dim or ())}
    if not reduced:
        return None
    kept = range(rank) if call.node.attrs.get("keepdim") else [d for d in range(rank) if d not in reduced]
    own = kept[call.dim]
    return None if own in reduced else Passage({"self": own})


row_op = partial(op, work=Work.ROWS, rows=_rows_kept)


@reduction(0)
def total(a: Tensor, b: Tensor) -> Tensor:
    return a + b


@reduction(1)
def product(a: Tensor, b: Tensor) -> Tensor:
    return a * b


@reduction(lowest, needs_elements=True)
def greatest(a: Tensor, b: Tensor) -> Tensor:
    return apply("max", a, b)


@reduction(highest, needs_elements=True)
def least(a: Tensor, b: Tensor) -> Tensor:
    return apply("min", a, b)


def _as_moments(element: Tensor, position: Tensor) -> State:
    one, zero = (full(element.trace, (), value, element.dtype) for value in (1.0, 0.0))
    return one, element, zero


@reduction(0.0, 0.0, 0.0, lift=_as_moments)
def moments(a: State, b: State) -> State:
    """How many, their mean, and the sum of squared differences from it.

    Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """
    (n, mean_a, squares_a), (m, mean_b, squares_b) = a, b
    count, apart = n + m, mean_b - mean_a
    share = m / apply("max", count, 1.0)  # none of no elements
    return count, mean_a + apart * share, squares_a + squares_b + apart * apart * n * share


def _as_term(element: Tensor, position: Tensor) -> State:
    return element, full(element.trace, (), 1.0, element.dtype)


@reduction(lowest, 0.0, lift=_as_term, finish=lambda greatest, terms: (greatest + apply("log", terms),))
def exponentials(a: State, b: State) -> State:
    """The greatest exponent, and the sum of powers relative to that one, which never overflows.

    Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    most = apply("max", a[0], b[0])
    parts = (where(apply("eq", x, most), terms, terms * apply("exp", x - most)) for x, terms in (a, b))
    return most, next(parts) + next(parts)


def with_place(element: Tensor, position: Tensor) -> State:
    return element, position.cast(INT32)


def _value_and_place(value: Tensor, place: Tensor) -> State:
    return value, place.cast(INT64)


def first(function: str, a: State, b: State, latest: bool = False) -> State:
    """Which of two values with their places comes first in PyTorch's order: NaN, then the extremum, then the place.

    Args:
        function: How a value compares with those behind it: ``gt`` or ``lt``.
        a, b: The values and places.
        latest: Whether of equal values that with the last place comes first.
    """
    (x, i), (y, j) = a, b
    ahead, same = apply(function, y, x), apply("eq", x, y)
    if x.dtype.is_float:
        x_is_nan, y_is_nan = apply("ne", x, x), apply("ne", y, y)
        ahead = apply("or", ahead, apply("and", y_is_nan, apply("not", x_is_nan)))
        same = apply("or", same, apply("and", x_is_nan, y_is_nan))
    later = apply("or", ahead, apply("and", same, j > i if latest else j < i))
    return where(later, y, x), where(later, j, i)


_extremum = partial(reduction, lift=with_place, finish=_value_and_place, needs_elements=True)


# A row whose extremum is the identity's has it everywhere, so first at 0: a place that no row is without.
@_extremum(lowest, 0)
def first_greatest(a: State, b: State) -> State:
    return first("gt", a, b)


@_extremum(highest, 0)
def first_least(a: State, b: State) -> State:
    return first("lt", a, b)


_MOST_SUMS = 1 << 15  # partial ones, which keep all of a device busy
_LEAST_PART = 16


def pixel_parts(x: Tensor) -> Tensor:
    """An image [N, C, ...] as [N, parts, C, pixels of a part], for sums by channel: few channels fill no device."""
    batch, channels, pixels = *x.shape[:2], prod(x.shape[2:])
    fitting = (n for n in range(1, pixels // _LEAST_PART + 1) if pixels % n == 0 and batch * channels * n <= _MOST_SUMS)
    parts = max(fitting, default=1)
    return x.reshape((batch, channels, parts, pixels // max(1, parts))).swap(1, 2)


def dims_of(dim: Any) -> Sequence[int]:
    return () if dim is None else (dim,) if isinstance(dim, int) else dim


@row_op("aten.sum.default", "aten.sum.dim_IntList")
def sum_(self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The sum over `dim`, or over all dimensions. Integers and booleans add up in int64."""
    kind = accumulator(self, dtype)
    return reduce(self, total, dims_of(dim), keepdim, kind)[0]


@row_op("aten.mean.default", "aten.mean.dim")
def mean(self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The mean over `dim`, or over all dimensions."""
    rank = len(self.shape)
    dims = [normalize_dim(d, rank) for d in dims_of(dim) if rank] or list(range(rank))
    kind = accumulator(self, dtype) if self.dtype.is_float or dtype is not None else FLOAT32
    count = prod(self.shape[d] for d in dims)
    (result,) = reduce(self, total, dims, keepdim, kind, 1 / count if count else None)
    return result if count else full(self.trace, result.shape, float("nan"), kind)


def accumulator(x: Tensor, name: Any) -> DType:
    if name is not None:
        return dtype(name)
    return x.dtype if x.dtype.is_float else INT64


@row_op("aten.nansum.default")
def nansum(self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The sum over `dim`, or over all dimensions, of what is not NaN."""
    return sum_(_without_nan(self), dim, keepdim, dtype)


@row_op("aten.nanmean.default")
def nanmean(self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The mean over `dim`, or over all dimensions, of what is not NaN."""
    if not self.dtype.is_float:
        raise OpRefusal(f"given {self.dtype}, expected floating point")
    numbers = apply("eq", self, self).cast(FLOAT32)
    (count,) = reduce(numbers, total, dims_of(dim), keepdim)
    (result,) = reduce(_without_nan(self), total, dims_of(dim), keepdim, FLOAT32)
    return (result / count).cast(accumulator(self, dtype))


def _without_nan(x: Tensor) -> Tensor:
    return where(apply("eq", x, x), x, full(x.trace, (), 0, x.dtype)) if x.dtype.is_float else x


@row_op("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero(self: Tensor, dim: Any = None) -> Tensor:
    """How many elements over `dim`, or over all dimensions, are nonzero."""
    return _count("ne", self, dims_of(dim), False).cast(INT64)


def _of_last(node: OpNode, graph: IRGraph) -> bool:
    rank = len(graph.tensors[str(node.inputs["self"])].shape)
    return [dim % rank for dim in dims_of(node.attrs.get("dim"))] == [rank - 1] and bool(node.attrs.get("keepdim"))


_LARGEST = Term("largest", ("self",), holds=_of_last)


@row_op("aten.amax.default", term=_LARGEST)
def amax(self: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """The maximum over `dim`, or over all dimensions."""
    return reduce(_ordered(self), greatest, dims_of(dim), keepdim)[0].cast(self.dtype)


@row_op("aten.amin.default")
def amin(self: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    """The minimum over `dim`, or over all dimensions."""
    return reduce(_ordered(self), least, dims_of(dim), keepdim)[0].cast(self.dtype)


def _ordered(x: Tensor) -> Tensor:
    """Booleans as numbers, of which there are extrema."""
    return x.cast(INT32) if x.dtype == BOOL else x


def _least_and_greatest(element: Tensor, position: Tensor) -> State:
    return element, element


@reduction(highest, lowest, lift=_least_and_greatest, needs_elements=True)
def extrema(a: State, b: State) -> State:
    return apply("min", a[0], b[0]), apply("max", a[1], b[1])


@row_op("aten.aminmax.default")
def aminmax(self: Tensor, dim: Any = None, keepdim: bool = False) -> State:
    """The minimum and the maximum over `dim`, or over all dimensions."""
    low, high = reduce(_ordered(self), extrema, dims_of(dim), keepdim)
    return low.cast(self.dtype), high.cast(self.dtype)


@row_op("aten.max.default")
def max_(self: Tensor) -> Tensor:
    """The maximum of all elements."""
    return amax(self)


@row_op("aten.min.default")
def min_(self: Tensor) -> Tensor:
    """The minimum of all elements."""
    return amin(self)


@row_op("aten.prod.default", "aten.prod.dim_int")
def prod_(self: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The product over `dim`, or over all dimensions. Integers and booleans multiply in int64."""
    return reduce(self, product, dims_of(dim), keepdim, accumulator(self, dtype))[0]


@row_op("aten.argmax.default")
def argmax(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The place of the maximum, or of a NaN, along `dim` or in row-major order; the first of several."""
    return reduce(self, first_greatest, dims_of(dim), keepdim)[1]


@row_op("aten.argmin.default")
def argmin(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The place of the minimum, or of a NaN, along `dim` or in row-major order; the first of several."""
    return reduce(self, first_least, dims_of(dim), keepdim)[1]


@row_op("aten.max.dim", term=_LARGEST)
def max_dim(self: Tensor, dim: int, keepdim: bool = False) -> State:
    """The maximum over `dim`, and where it is."""
    value, place = reduce(_ordered(self), first_greatest, (dim,), keepdim)
    return value.cast(self.dtype), place


@row_op("aten.min.dim")
def min_dim(self: Tensor, dim: int, keepdim: bool = False) -> State:
    """The minimum over `dim`, and where it is."""
    value, place = reduce(_ordered(self), first_least, (dim,), keepdim)
    return value.cast(self.dtype), place


@row_op("aten.var.correction", "aten.var.default", "aten.var.dim")
def var(self: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: Any = None) -> Tensor:
    """The variance over `dim`, or over all dimensions: squared differences from the mean over ``n - correction``."""
    return _variance(self, dim, unbiased, keepdim, correction)[0]


@row_op("aten.std.correction", "aten.std.default", "aten.std.dim")
def std(self: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: Any = None) -> Tensor:
    """The root of the variance, see `var`."""
    return _variance(self, dim, unbiased, keepdim, correction, is_root=True)[0]


@row_op("aten.var_mean.correction", "aten.var_mean.default", "aten.var_mean.dim")
def var_mean(
    self: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: Any = None
) -> State:
    """The variance, see `var`, and the mean."""
    return _variance(self, dim, unbiased, keepdim, correction)


@row_op("aten.std_mean.correction", "aten.std_mean.default", "aten.std_mean.dim")
def std_mean(
    self: Tensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, correction: Any = None
) -> State:
    """The root of the variance, see `var`, and the mean."""
    return _variance(self, dim, unbiased, keepdim, correction, is_root=True)


def _variance(x: Tensor, dim: Any, unbiased: bool, keepdim: bool, correction: Any, is_root: bool = False) -> State:
    if not x.dtype.is_float:
        raise OpRefusal(f"given {x.dtype}, expected floating point")
    rank = len(x.shape)
    count = prod(x.shape[d] for d in {normalize_dim(d, rank) for d in dims_of(dim) if rank} or range(rank))
    divisor = max(0.0, count - float(correction if correction is not None else unbiased))

    def finish(number: Tensor, mean: Tensor, squares: Tensor) -> State:
        variance = apply("div", squares, divisor)
        known = mean if count else mean.with_expr(full(x.trace, (), float("nan"), mean.dtype).expr)
        return apply("sqrt", variance) if is_root else variance, known

    return reduce(x, replace(moments, finish=finish), dims_of(dim), keepdim)


@row_op("aten.logsumexp.default")
def logsumexp(self: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    """The logarithm of the sum of ``e ** self`` over `dim`."""
    return reduce(self if self.dtype.is_float else self.cast(FLOAT32), exponentials, dims_of(dim), keepdim)[0]


@row_op("aten.any.default", "aten.any.dim")
def any_(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Whether any element over `dim` is nonzero; of no elements, none is."""
    return _as_truth(_count("ne", self, dims_of(dim), keepdim) > 0, self)


@row_op("aten.all.default", "aten.all.dim")
def all_(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Whether all elements over `dim` are nonzero; of no elements, all are."""
    return _as_truth(_count("eq", self, dims_of(dim), keepdim) <= 0, self)


@row_op("aten.any.dims")
def anydims_of(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Whether any element over several dimensions is nonzero; over an empty list of them, whether each element is."""
    return _as_truth(apply("ne", self, False), self) if _is_empty(dim) else any_(self, dim, keepdim)


@row_op("aten.all.dims")
def alldims_of(self: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Whether all elements over several dimensions are nonzero; over an empty list of them, whether each element is."""
    return _as_truth(apply("ne", self, False), self) if _is_empty(dim) else all_(self, dim, keepdim)


def _count(comparison: str, x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """How many elements over `dims` compare so with zero."""
    return reduce(apply(comparison, x, False).cast(INT32), total, dims, keepdim)[0]


def _is_empty(dim: Any) -> bool:
    return dim is not None and not isinstance(dim, int) and len(dim) == 0


def _as_truth(result: Tensor, x: Tensor) -> Tensor:
    """Booleans; as numbers 0 and 1 for uint8, as in PyTorch."""
    return result.cast(UINT8) if x.dtype == UINT8 else result


@op("aten.histc.default", work=Work.ROWS, counts=True)
def histc(self: Tensor, bins: int = 100, min: Number = 0, max: Number = 0) -> Tensor:
    """How many elements lie in each of `bins` equal parts of the range from `min` to `max`, both included."""
    if not min < max or bins < 1:
        expected = "one or more of a range that is not empty and known beforehand"
        raise OpRefusal(f"given {bins} bins from {min} to {max}, expected {expected}")
    x = self.cast(FLOAT32).reshape((1, -1))
    place = (x - float(min)) * float(bins) / (float(max) - float(min))
    first = arange(self.trace, bins).cast(FLOAT32).reshape((bins, 1))
    end = where(first < bins - 1, first + 1, float("inf"))  # the last one has its end, too
    inside = (place >= first).cast(FLOAT32) * (place < end).cast(FLOAT32) * (x <= float(max)).cast(FLOAT32)
    return reduce(inside, total, (1,), False)[0]
