"""Writes by index: values that replace elements, and values that are combined with them.

What replaces is a scatter of the trace: one kernel stores each value where its index says. What combines is computed
from the side of the result, so that it is the same in every run: each element looks for the values that are for it.
Where whole rows of floating point have one index each, that is a problem with kernels of its own (`ScatterRows`), whose
blocks of rows look through the indices together; else it is a reduction over a comparison of the indices with all
positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from npu_compiler.dtypes import BOOL, FLOAT32, INT32, INT64, DType
from npu_compiler.ops.indexing import Indexed, indices_of
from npu_compiler.ops.reduction import greatest, least, product, total
from npu_compiler.ops.registry import op
from npu_compiler.ops.scans import cumsum
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.expr import Const
from npu_compiler.tensor.reducing import highest, lowest, reduce
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, apply, arange, full, where
from npu_compiler.tensor.trace import Map

_REDUCTIONS = {"sum": total, "mean": total, "prod": product, "amax": greatest, "amin": least}
_SPELLED = {"add": "sum", "multiply": "prod", "sum": "sum", "prod": "prod", "mean": "mean", "amax": "amax"}
_SPELLED |= {"amin": "amin"}


def _how(reduce: Any) -> str:
    if reduce not in _SPELLED:
        raise OpRefusal(f"given reduce={reduce!r:.40}, expected one of {', '.join(_SPELLED)}")
    return _SPELLED[reduce]


# ---- values that replace elements


@op("aten.scatter.src", "aten.scatter_.src")
def scatter(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """``self[i, index[i, j, ...], ...] = src[i, j, ...]`` along `dim`, for all positions of `index`."""
    self, dim, index, src, shape = _like_rows(self, dim, index, src)
    if not prod(index.shape):
        return self.reshape(shape)
    places = indices_of(index).within(self.shape[dim], otherwise=-1)
    return self.trace.scatter(self, {dim: places}, src).reshape(shape)


@op("aten.scatter.value", "aten.scatter_.value")
def scatter_value(self: Tensor, dim: int, index: Tensor, value: Number) -> Tensor:
    """``self[i, index[i, j, ...], ...] = value`` along `dim`, for all positions of `index`."""
    return scatter(self, dim, index, full(self.trace, index.shape, value, self.dtype))


@op(
    "aten.index_fill.int_Scalar", "aten.index_fill_.int_Scalar",
    "aten.index_fill.int_Tensor", "aten.index_fill_.int_Tensor",
)  # fmt: skip
def index_fill(self: Tensor, dim: int, index: Tensor, value: Tensor | Number) -> Tensor:
    """`self` with one value at the positions `index` of dimension `dim`, where negative ones count from the end."""
    x = self if self.shape else self.reshape((1,))
    dim, (count,) = normalize_dim(dim, len(x.shape)), index.shape or (1,)
    number = value if isinstance(value, Tensor) else full(x.trace, (), value, x.dtype)
    filled = number.cast(x.dtype).expand((*x.shape[:dim], count, *x.shape[dim + 1 :]))
    if not prod(filled.shape):
        return self
    places = indices_of(index).within(x.shape[dim], wraps=True, otherwise=-1)
    return x.trace.scatter(x, {dim: _along(places, dim, len(x.shape))}, filled).reshape(self.shape)


@op("aten.index_put.default", "aten.index_put_.default", "aten._unsafe_index_put.default")
def index_put(
    self: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False,
    _dims: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """``self[indices] = values``, or ``+=``; a mask of booleans takes one value for all that it names."""
    if len(indices) == 1 and indices[0].dtype == BOOL:
        return _put_by_mask(self, indices[0], values, accumulate, 0 if _dims is None else _dims[0])
    found = Indexed.of(self, indices, _dims, otherwise=-1)
    named = values.expand(found.shape(self.shape))
    if not prod(named.shape):
        return self
    if accumulate:
        return _accumulated(self, found, named)
    return self.trace.scatter(self, found.places, named, found.walks)


def _put_by_mask(x: Tensor, mask: Tensor, values: Tensor, accumulate: bool, dim: int) -> Tensor:
    """`x` with a value wherever a mask of dimensions from `dim` on is true."""
    end = dim + len(mask.shape)
    if mask.shape != x.shape[dim:end]:
        raise OpRefusal(f"given a mask {list(mask.shape)} for {list(x.shape)} from dimension {dim} on")
    rank = 1 + len(x.shape) - len(mask.shape)
    shape = ((1,) * (rank - len(values.shape)) + values.shape) if len(values.shape) <= rank else ()
    if not shape or shape[dim] != 1:
        raise OpRefusal(
            f"given values {list(values.shape)} for the elements that a mask names, whose number depends on its "
            "values; expected one value for all of them, or masked_scatter"
        )
    same = values.reshape((*shape[:dim], *(1,) * len(mask.shape), *shape[dim + 1 :])).cast(x.dtype)
    chosen = mask.reshape((*mask.shape, *(1,) * (len(x.shape) - end)))
    return where(chosen, (x + same).cast(x.dtype) if accumulate else same, x)


@op("aten.put.default", "aten.put_.default")
def put(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """`self` with the elements of `source` at positions in row-major order, or with them added there."""
    flat = self.reshape((prod(self.shape),))
    at, new = (t.reshape((prod(t.shape),)) for t in (index, source))
    return index_put(flat, (at,), new, accumulate).reshape(self.shape)


@op("aten.masked_scatter.default", "aten.masked_scatter_.default")
def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`self` with the elements of `source`, in order, where a mask is true."""
    mask = mask.expand(self.shape).realize()
    if not prod(self.shape):
        return self
    rank, ref = len(self.shape), mask.placed()
    kept = rank
    while kept and (ref.view.strides[kept - 1] == 0 or self.shape[kept - 1] == 1):
        kept -= 1  # the mask is the same all along the last dimensions
    run = prod(self.shape[kept:])
    rows = mask
    for dim in range(kept, rank):
        rows = rows.slice(dim, 0, 1)
    count = prod(self.shape[:kept])
    ahead = (cumsum(rows.reshape((count,)), 0) - 1).realize()
    starts = ahead.reshape((*self.shape[:kept], *(1,) * (rank - kept))) * run
    steps = arange(self.trace, run).reshape((*(1,) * kept, *self.shape[kept:]))
    flat = source.reshape((prod(source.shape),))
    wanted = where(mask, (starts + steps).expand(self.shape), 0)
    if not flat.shape[0]:
        flat = full(self.trace, (1,), 0, self.dtype)
        wanted = where(mask, -1, wanted)
    taken = flat.pick({0: wanted.within(flat.shape[0])}, (1,) * rank)
    return where(mask, taken.cast(self.dtype), self)


# ---- values that are combined with elements


@op("aten.scatter.reduce", "aten.scatter_.reduce", work=Work.ROWS)
def scatter_with(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: Any) -> Tensor:
    """``self[i, index[i, j, ...], ...]`` added to, or multiplied with, ``src[i, j, ...]`` along `dim`."""
    return _scattered(self, dim, index, src, _how(reduce), True)


@op("aten.scatter.value_reduce", "aten.scatter_.value_reduce", work=Work.ROWS)
def scatter_value_with(self: Tensor, dim: int, index: Tensor, value: Number, reduce: Any) -> Tensor:
    """``self[i, index[i, j, ...], ...]`` added to, or multiplied with, a number, once for each position of `index`."""
    return _scattered(self, dim, index, full(self.trace, index.shape, value, self.dtype), _how(reduce), True)


@op("aten.scatter_add.default", "aten.scatter_add_.default", work=Work.ROWS)
def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """``self[i, index[i, j, ...], ...] += src[i, j, ...]`` along `dim`, for all positions of `index`."""
    return _scattered(self, dim, index, src, "sum", True)


@op("aten.scatter_reduce.two", "aten.scatter_reduce_.two", work=Work.ROWS)
def scatter_reduce(
    self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: Any, include_self: bool = True
) -> Tensor:
    """The sum, prod, mean, amax or amin of each element and the values of `src` whose index along `dim` names it."""
    return _scattered(self, dim, index, src, _how(reduce), include_self)


@op("aten.index_add.default", "aten.index_add_.default", work=Work.ROWS)
def index_add(self: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Number = 1) -> Tensor:
    """`self` with the slices of `source`, times `alpha`, added at the positions `index` of dimension `dim`."""
    return _indexed(self, dim, index, source if alpha == 1 else source * alpha, "sum", True)


@op("aten.index_reduce.default", "aten.index_reduce_.default", work=Work.ROWS)
def index_reduce(
    self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: Any, include_self: bool = True
) -> Tensor:
    """The prod, mean, amax or amin of `self` and the slices of `source` at the positions `index` of `dim`."""
    return _indexed(self, dim, index, source, _how(reduce), include_self)


def _indexed(x: Tensor, dim: int, index: Tensor, source: Tensor, how: str, include_self: bool) -> Tensor:
    if not x.shape:
        one = source.reshape((prod(source.shape),))
        return _indexed(x.reshape((1,)), 0, index, one, how, include_self).reshape(())
    dim, (count,) = normalize_dim(dim, len(x.shape)), index.shape or (1,)
    if source.shape != (*x.shape[:dim], count, *x.shape[dim + 1 :]):
        raise OpRefusal(f"{list(source.shape)} does not fit {list(x.shape)} at {count} positions of dimension {dim}")
    places = indices_of(index).within(x.shape[dim], otherwise=-1) if prod(source.shape) else index
    return reduced_rows(x, dim, places.reshape((count,)), source, how, include_self)


def _scattered(x: Tensor, dim: int, index: Tensor, src: Tensor, how: str, include_self: bool) -> Tensor:
    x, dim, index, src, shape = _like_rows(x, dim, index, src)
    if not prod(index.shape):
        return x.reshape(shape)
    whole = x
    for other, size in enumerate(index.shape):
        x = x if other == dim else x.slice(other, 0, size)
    row = _index_of_rows(index, dim)
    places = indices_of(index if row is None else row).within(x.shape[dim], otherwise=-1)
    if row is None:
        result = _reduced_elements(x, dim, places, src, how, include_self)
    else:
        result = reduced_rows(x, dim, places, src, how, include_self)
    return _pasted(whole, result).reshape(shape)


def _like_rows(x: Tensor, dim: int, index: Tensor, src: Tensor) -> tuple[Tensor, int, Tensor, Tensor, tuple[int, ...]]:
    """The operands of a scatter with a dimension at least, `src` cut as `index` is; and the shape of the result."""
    shape = x.shape
    x, index, src = (t if t.shape else t.reshape((1,)) for t in (x, index, src))
    dim = normalize_dim(dim, len(x.shape))
    if not prod(index.shape):
        return x, dim, index, src, shape
    fits = len(x.shape) == len(index.shape) == len(src.shape)
    for other, size in enumerate(index.shape if fits else ()):
        fits = fits and size <= src.shape[other] and (other == dim or size <= x.shape[other])
    if not fits:
        raise OpRefusal(
            f"the index {list(index.shape)} does not fit into {list(src.shape)}, or beside dimension {dim} into "
            f"{list(x.shape)}"
        )
    for other, size in enumerate(index.shape):
        src = src.slice(other, 0, size)
    return x, dim, index, src, shape


def _index_of_rows(index: Tensor, dim: int) -> Tensor | None:
    """The index [n] of whole rows, where it is the same along all dimensions but `dim`; else None."""
    if index.ref is None:
        return None
    others = [other for other in range(len(index.shape)) if other != dim]
    if any(index.shape[other] > 1 and index.ref.view.strides[other] for other in others):
        return None
    for other in others:
        index = index.slice(other, 0, 1)
    return index.reshape((prod(index.shape),))


def _pasted(whole: Tensor, part: Tensor) -> Tensor:
    """`whole` but for its first positions along some dimensions, which are `part`."""
    inside: Tensor | None = None
    part = part.realize()
    for dim, (size, own) in enumerate(zip(whole.shape, part.shape, strict=True)):
        if size != own:
            here = arange(whole.trace, size).reshape((size, *(1,) * (len(whole.shape) - dim - 1))) < own
            inside = here if inside is None else apply("and", inside, here)
            part = part.slice(dim, 0, size)  # read only where the position is inside
    return part if inside is None else where(inside, part, whole)


def _accumulated(x: Tensor, found: Indexed, values: Tensor) -> Tensor:
    """`x` with values added to the elements that indices name."""
    rank, dims = len(x.shape), list(found.places)
    walked = [*found.before, *found.after]
    sizes = [x.shape[dim] for dim in dims]
    position: Tensor | None = None
    nowhere: Tensor | None = None
    for dim, place in found.places.items():
        here = place.reshape(place.shape[: len(place.shape) - len(found.after)])
        position = here if position is None else position * x.shape[dim] + here
        beyond = here < 0
        nowhere = beyond if nowhere is None else apply("or", nowhere, beyond)
    assert position is not None
    assert nowhere is not None
    at = where(nowhere, -1, position).expand(found.common).realize().reshape((prod(found.common),))
    rest = prod(x.shape[dim] for dim in walked)
    rows = x.permute([*dims, *walked]).reshape((prod(sizes), rest))
    first, middle = len(found.before), len(found.common)
    order = [*range(first, first + middle), *range(first), *range(first + middle, len(values.shape))]
    new = values.permute(order).reshape((prod(found.common), rest))
    result = reduced_rows(rows, 0, at, new, "sum", True).realize()
    back = sorted(range(rank), key=[*dims, *walked].__getitem__)
    return result.reshape([*sizes, *(x.shape[dim] for dim in walked)]).permute(back)


def reduced_rows(x: Tensor, dim: int, places: Tensor, values: Tensor, how: str, include_self: bool) -> Tensor:
    """`x` with rows of `values` combined at positions of a dimension.

    Args:
        x: Any shape.
        dim: The dimension, counted from the front.
        places: [n], where each row goes, integers; a number beyond the dimension is nowhere.
        values: The shape of `x`, but for n in place of its size along `dim`.
        how: sum, prod, mean, amax or amin.
        include_self: Whether elements that are named count among what is combined.
    """
    if not prod(values.shape):
        return x
    if not x.dtype.is_float or not values.dtype.is_float:
        return _reduced_elements(x, dim, _along(places, dim, len(x.shape)), values, how, include_self)
    outer, inner = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    shape = (outer, x.shape[dim], inner)
    rows = values.reshape((outer, values.shape[dim], inner))
    fill = _only_value(x)
    operands = (places.cast(INT32), rows, *(() if fill is not None else (x.reshape(shape),)))
    result = x.trace.anchor(
        "scatter_rows", operands, shape, x.dtype, how=how, include_self=include_self, fill=fill or 0.0
    )
    return result.reshape(x.shape)


def _only_value(x: Tensor) -> float | None:
    """The number that a tensor was filled with, as the base of sums mostly is; None of any other tensor."""
    made = None if x.ref is None else x.trace.tensors[x.ref.tensor].source
    expr = made.expr if isinstance(made, Map) else x.expr
    return float(expr.value) if isinstance(expr, Const) else None


def _along(places: Tensor, dim: int, rank: int) -> Tensor:
    """Positions [n] or a single one, as they broadcast along a dimension."""
    return places.reshape((prod(places.shape), *(1,) * (rank - dim - 1)))


def _reduced_elements(x: Tensor, dim: int, places: Tensor, values: Tensor, how: str, include_self: bool) -> Tensor:
    """As `reduced_rows`, for places that broadcast to the shape of `values`: each element compares all of them."""
    kind = _accumulator(x.dtype, how)
    size, count = x.shape[dim], values.shape[dim]
    new = values.cast(x.dtype).cast(kind).move_last(dim)
    at = places.expand(values.shape).move_last(dim)
    outer = new.shape[:-1]
    new, at = (t.reshape((*outer, 1, count)) for t in (new, at))
    hit = apply("eq", at, arange(x.trace, size).reshape((size, 1)))
    neutral = {"prod": 1, "amax": lowest(kind), "amin": highest(kind)}.get(how, 0)
    (found,) = reduce(where(hit, new, full(x.trace, (), neutral, kind)), _REDUCTIONS[how], (-1,), False, kind)
    base = x.cast(kind).move_last(dim)
    if how == "mean" or not include_self:
        (number,) = reduce(hit, total, (-1,), False, INT32)
        named = number > 0
        own = base if include_self else where(named, full(x.trace, (), neutral, kind), base)
        if how == "mean":
            parts = number + 1 if include_self else where(named, number, 1)
            result = (own + found) / parts.cast(FLOAT32)
        else:
            result = where(named, _both(own, found, how), base)
    else:
        result = _both(base, found, how)
    return result.cast(x.dtype).realize().move_from_last(dim)


def _both(a: Tensor, b: Tensor, how: str) -> Tensor:
    return apply({"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}[how], a, b)


def _accumulator(dtype: DType, how: str) -> DType:
    """The data type in which elements are combined: of integers one that wraps around as theirs does."""
    if dtype.is_float:
        return FLOAT32
    if how == "mean":
        raise OpRefusal(f"a mean of {dtype} is not supported; convert it with .to(torch.float32) first")
    return dtype if dtype == INT64 else INT32
