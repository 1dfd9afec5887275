"""Ops that put elements in order, or find some by their rank."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from npu_compiler.dtypes import INT32, INT64
from npu_compiler.ops.indexing import gather
from npu_compiler.ops.reduction import first_greatest, greatest, total
from npu_compiler.ops.registry import elementwise, op
from npu_compiler.ops.rows import apart_from_dim
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.reducing import State, reduce, scan
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, apply, arange, full, refuse_codes, where

_sort_op = partial(op, work=Work.ANCHOR, rows=apart_from_dim)


def _places(x: Tensor, dim: int, descending: bool, count: int) -> Tensor:
    """The places along `dim`, counted from the front, of the first `count` elements in order: int32."""
    refuse_codes(x)
    outer, length, inner = prod(x.shape[:dim]), x.shape[dim], prod(x.shape[dim + 1 :])
    source = x.reshape((outer, length, inner)).permute((0, 2, 1))
    found = x.trace.anchor("sort", (source,), (outer, inner, count), INT32, descending=descending)
    x.trace.bounds[found.placed().tensor] = (0, max(0, length - 1))
    return found.permute((0, 2, 1)).reshape((*x.shape[:dim], count, *x.shape[dim + 1 :]))


def _in_order(x: Tensor, dim: int, descending: bool, count: int | None = None) -> State:
    """The first elements in order, all of them if no count is given, and their places."""
    if not x.shape:
        values, places = _in_order(x.reshape((1,)), 0, descending, count)
        return values.reshape(()), places.reshape(())
    dim, x = normalize_dim(dim, len(x.shape)), x.realize()
    places = _places(x, dim, descending, x.shape[dim] if count is None else count).cast(INT64)
    return gather(x, dim, places), places


@_sort_op("aten.sort.default", "aten.sort.stable")
def sort(self: Tensor, stable: Any = None, dim: int = -1, descending: bool = False) -> State:
    """The elements in order along `dim`, and where each was; equal ones stay in order. NaN is the greatest."""
    return _in_order(self, dim, descending)


@_sort_op("aten.msort.default", rows=None)
def msort(self: Tensor) -> Tensor:
    """The elements in order along the first dimension."""
    return _in_order(self, 0, False)[0]


@_sort_op("aten.argsort.default", "aten.argsort.stable")
def argsort(self: Tensor, stable: Any = None, dim: int = -1, descending: bool = False) -> Tensor:
    """Where each element of `sort` was."""
    return _in_order(self, dim, descending)[1]


@_sort_op("aten.topk.default")
def topk(self: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> State:
    """The `k` greatest elements along `dim`, or the least, and where they are; in order, `sorted` or not."""
    size = self.shape[normalize_dim(dim, len(self.shape))] if self.shape else 1
    if not 0 <= k <= size:
        raise OpRefusal(f"given k={k}, expected 0 to {size}, as many elements as there are along dimension {dim}")
    if k == 0:
        dim = normalize_dim(dim, len(self.shape))
        none = (*self.shape[:dim], 0, *self.shape[dim + 1 :])
        return full(self.trace, none, 0, self.dtype), full(self.trace, none, 0, INT64)
    return _in_order(self, dim, largest, k)


def _at_rank(x: Tensor, dim: int, rank: int, keepdim: bool) -> State:
    """The element of a rank, counted from 0, along `dim`, and where it is."""
    if not x.shape:
        return x.realize(), full(x.trace, (), 0, INT64)
    dim, x = normalize_dim(dim, len(x.shape)), x.realize()
    # of the nearer end there is less to put in order
    descending = x.shape[dim] - rank - 1 < rank
    rank = x.shape[dim] - rank - 1 if descending else rank
    places = _places(x, dim, descending, rank + 1).slice(dim, rank, 1).cast(INT64)
    return _shaped(gather(x, dim, places), places, dim, keepdim)


def _shaped(values: Tensor, places: Tensor, dim: int, keepdim: bool) -> State:
    """Values and places, whose dimension `dim` has one element, without it where it is not to be kept."""
    left = (*values.shape[:dim], *values.shape[dim + 1 :])
    return (values, places) if keepdim else (values.realize().reshape(left), places.realize().reshape(left))


@_sort_op("aten.kthvalue.default", rows=None)
def kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> State:
    """The element of rank `k`, counted from 1, along `dim`, and where it is; NaN is the greatest."""
    size = self.shape[normalize_dim(dim, len(self.shape))] if self.shape else 1
    if not 1 <= k <= size:
        raise OpRefusal(f"given k={k}, expected 1 to {size}, as many elements as there are along dimension {dim}")
    return _at_rank(self, dim, k - 1, keepdim)


@_sort_op("aten.median.dim", rows=None)
def median_dim(self: Tensor, dim: int, keepdim: bool = False) -> State:
    """The median along `dim`, of two the lower one, and where it is; NaN where there is any."""
    _refuse_none(self)
    size = self.shape[normalize_dim(dim, len(self.shape))] if self.shape else 1
    x = self.realize()
    values, places = _at_rank(x, dim, (size - 1) // 2, keepdim)
    if not self.dtype.is_float:
        return values, places
    highest, first = reduce(x, first_greatest, (dim,), keepdim)
    has_none = apply("ne", highest, highest)
    return where(has_none, highest, values), where(has_none, first, places)


@_sort_op("aten.median.default", rows=None)
def median(self: Tensor) -> Tensor:
    """The median of all elements, of two the lower one; NaN where there is any."""
    return median_dim(self.reshape((-1,)), 0)[0]


@_sort_op("aten.nanmedian.dim", rows=None)
def nanmedian_dim(self: Tensor, dim: int, keepdim: bool = False) -> State:
    """The median along `dim` of what is not NaN, of two the lower one, and where it is."""
    _refuse_none(self)
    if not self.dtype.is_float or not self.shape:
        return _at_rank(self, dim, (self.shape[dim] - 1) // 2 if self.shape else 0, keepdim)
    dim, x = normalize_dim(dim, len(self.shape)), self.realize()
    size = x.shape[dim]
    (numbers,) = reduce(apply("eq", x, x).cast(INT32), total, (dim,), True)
    rank = apply("min", apply("div", apply("max", numbers - 1, 0), 2), size - 1).realize()
    x.trace.bounds[rank.ref.tensor] = (0, size - 1)  # type: ignore[union-attr]
    places = gather(_places(x, dim, False, size), dim, rank).realize()
    x.trace.bounds[places.ref.tensor] = (0, size - 1)  # type: ignore[union-attr]
    return _shaped(gather(x, dim, places), places.cast(INT64), dim, keepdim)


@_sort_op("aten.nanmedian.default", rows=None)
def nanmedian(self: Tensor) -> Tensor:
    """The median of all elements that are not NaN, of two the lower one."""
    return nanmedian_dim(self.reshape((-1,)), 0)[0]


def _refuse_none(x: Tensor) -> None:
    if not prod(x.shape):
        raise OpRefusal(f"given {list(x.shape)}, expected at least one element")


@_sort_op("aten.mode.default", rows=None)
def mode(self: Tensor, dim: int = -1, keepdim: bool = False) -> State:
    """The most frequent element along `dim`, of several the least, and where it is last."""
    _refuse_none(self)
    if not self.shape:
        return self.realize(), full(self.trace, (), 0, INT64)
    dim = normalize_dim(dim, len(self.shape))
    values, places = (part.realize() for part in _in_order(self, dim, False))
    size = self.shape[dim]
    position = arange(self.trace, size).reshape((size, *(1,) * (len(self.shape) - dim - 1)))
    before = values.slice(dim, -1, size)  # read only where there is one
    begins = apply("or", position < 1, where(position >= 1, apply("ne", values, before), False))
    start = scan(where(begins, position, 0), greatest, dim)
    ends = reduce(position - start, first_greatest, (dim,), True)[1].realize()
    self.trace.bounds[ends.ref.tensor] = (0, size - 1)  # type: ignore[union-attr]
    return _shaped(gather(values, dim, ends), gather(places, dim, ends), dim, keepdim)


@elementwise("aten.searchsorted.Tensor", "aten.searchsorted.Scalar", rows=None)
def searchsorted(
    sorted_sequence: Tensor,
    self: Tensor | Number,
    out_int32: bool = False,
    right: bool = False,
    side: Any = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Where each number belongs in a sorted row [..., n]: ahead of equal elements, or with `right` behind them."""
    if sorter is not None:
        raise OpRefusal("given a sorter, which is not supported; sort the sequence first")
    if side not in (None, "left", "right") or (side == "left" and right):
        raise OpRefusal(f"given side={side!r} and right={right}, expected one of both")
    return _searched(sorted_sequence, self, right or side == "right", out_int32)


@elementwise("aten.bucketize.Tensor", "aten.bucketize.Scalar", rows=None)
def bucketize(self: Tensor | Number, boundaries: Tensor, out_int32: bool = False, right: bool = False) -> Tensor:
    """Between which of the sorted boundaries [n] each number lies: how many are ahead of it, see `searchsorted`."""
    return _searched(boundaries, self, right, out_int32)


def _searched(boundaries: Tensor, given: Tensor | Number, right: bool, out_int32: bool) -> Tensor:
    """How many of the sorted boundaries [..., n] are ahead of each value [..., m], by halving what may be."""
    trace, size = boundaries.trace, boundaries.shape[-1]
    values = given if isinstance(given, Tensor) else full(trace, (), given, boundaries.dtype)
    flat, start = boundaries.realize(), full(trace, (), 0, INT64)
    if len(boundaries.shape) > 1:
        if values.shape[:-1] != boundaries.shape[:-1]:
            raise OpRefusal(f"given boundaries {list(boundaries.shape)} for {list(values.shape)}, expected equal rows")
        rows = prod(boundaries.shape[:-1])
        start = arange(trace, rows).reshape((*boundaries.shape[:-1], 1)) * size
        flat = flat.reshape((rows * size,))
    found = full(trace, values.shape, 0, INT64)
    step = 1 << size.bit_length() >> 1
    while step:
        reached = found + step
        at = (start + apply("min", reached, size) - 1).expand(values.shape)
        ahead = apply("not", apply("gt" if right else "ge", flat.gather(0, at), values))  # of NaN all are
        found = where(apply("and", reached <= size, ahead), reached, found)
        step //= 2
    return found.cast(INT32) if out_int32 else found
