"""Tensors with other elements at some of their places, and the views that name these places.

What a model changes in place is written with these ops once no two tensors share memory. A part that is put back is
arithmetic like any other: each element of the whole comes from the part where that lies, else from what was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from npu_compiler.dtypes import BOOL, INT64
from npu_compiler.integers import ceil_div
from npu_compiler.ops import lenses
from npu_compiler.ops.registry import elementwise, op, view
from npu_compiler.tensor.expr import Iota
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, apply, arange, full, where
from npu_compiler.tensor.view import View


def _stored(value: Tensor, into: Tensor) -> Tensor:
    """Values in the data type of the tensor that takes them; of booleans, whether they are nonzero."""
    if into.dtype == BOOL and value.dtype != BOOL:
        return apply("ne", value, 0)
    return value.cast(into.dtype)


@elementwise("aten.copy.default", "aten.copy_.default", reads_first=False)
def copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """`src` in the shape and data type of `self`."""
    return _stored(src, self).expand(self.shape)


@elementwise(
    "aten.fill.Scalar", "aten.fill_.Scalar", "aten.fill.Tensor", "aten.fill_.Tensor",
    reads_first=False, fills=("value",),
)  # fmt: skip
def fill(self: Tensor, value: Tensor | Number) -> Tensor:
    """One value, with the shape and data type of `self`."""
    if isinstance(value, Tensor):
        if value.shape:
            raise OpRefusal(f"given a value of shape {list(value.shape)}, expected a number")
        return _stored(value, self).expand(self.shape)
    number = bool(value) if self.dtype == BOOL else value if self.dtype.is_float else int(value)
    return full(self.trace, self.shape, number, self.dtype)


@elementwise("aten.zero.default", "aten.zero_.default", reads_first=False)
def zero(self: Tensor) -> Tensor:
    """Zeros, with the shape and data type of `self`."""
    return full(self.trace, self.shape, 0, self.dtype)


def _places(x: Tensor, dim: int, extent: int) -> Tensor:
    """Positions along a dimension, for tensors of the rank of `x`."""
    return arange(x.trace, extent).reshape((extent, *(1,) * (len(x.shape) - dim - 1)))


@op("aten.slice_scatter.default")
def slice_scatter(self: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    """`self` with `src` at positions `start` to `end` of a dimension, `step` apart."""
    dim = normalize_dim(dim, len(self.shape))
    if step < 1:
        raise OpRefusal(f"given step={step}, expected at least 1")
    size = self.shape[dim]
    taken = range(*slice(start, end, step).indices(size))
    expected = (*self.shape[:dim], len(taken), *self.shape[dim + 1 :])
    if src.shape != expected:
        raise OpRefusal(f"given {list(src.shape)}, expected {list(expected)} to put into {list(self.shape)}")
    value = _stored(src, self)
    if not taken or len(taken) == size:
        return value if taken else self
    if len(taken) == 1:
        return where(apply("eq", _places(self, dim, size), taken[0]), value, self)
    if step == 1:
        return _with_run(self, value, dim, taken.start)
    return _with_steps(self, value, dim, taken)


def _with_run(x: Tensor, value: Tensor, dim: int, start: int) -> Tensor:
    """Neighbouring positions of a dimension replaced; outside of them the value is named, and not read."""
    size, length = x.shape[dim], value.shape[dim]
    places = _places(x, dim, size)
    inside = apply("and", places >= start, places < start + length)
    return where(inside, value.realize().slice(dim, -start, size), x)


def _with_steps(x: Tensor, value: Tensor, dim: int, taken: range) -> Tensor:
    """Positions of a dimension replaced that lie apart: `taken` is a column of its positions in rows of one step."""
    size, step = x.shape[dim], taken.step
    first, column = divmod(taken.start, step)
    rows = ceil_div(size, step)
    apart = (*x.shape[:dim], rows, step, *x.shape[dim + 1 :])
    filled = x if rows * step == size else x.realize().slice(dim, 0, rows * step)
    old = filled.reshape(apart)
    row = arange(x.trace, rows).reshape((rows, *(1,) * (len(x.shape) - dim)))
    place = arange(x.trace, step).reshape((step, *(1,) * (len(x.shape) - dim - 1)))
    hit = apply("and", row >= first, apply("and", row < first + len(taken), apply("eq", place, column)))
    there = (*value.shape[:dim], value.shape[dim], 1, *value.shape[dim + 1 :])
    new = value.realize().reshape(there).slice(dim, -first, rows)
    if rows * step != size:  # the last row goes on where the tensor has ended
        old = where(row * step + place < size, old, full(x.trace, (), 0, x.dtype))
    mixed = where(hit, new, old).reshape((*x.shape[:dim], rows * step, *x.shape[dim + 1 :]))
    return mixed.slice(dim, 0, size)


@op("aten.select_scatter.default")
def select_scatter(self: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """`self` with `src` at one position of a dimension, which `src` does not have."""
    dim = normalize_dim(dim, len(self.shape))
    size = self.shape[dim]
    expected = (*self.shape[:dim], *self.shape[dim + 1 :])
    if not -size <= index < size or src.shape != expected:
        raise OpRefusal(
            f"given {list(src.shape)} at {index}, expected {list(expected)} at one of {size} of {list(self.shape)}"
        )
    value = _stored(src, self).reshape((*self.shape[:dim], 1, *self.shape[dim + 1 :]))
    return where(apply("eq", _places(self, dim, size), index % size), value, self)


def _diagonal_dims(x: Tensor, dim1: int, dim2: int) -> tuple[int, int]:
    first, second = normalize_dim(dim1, len(x.shape)), normalize_dim(dim2, len(x.shape))
    if first == second:
        raise OpRefusal(f"given dim1={dim1} and dim2={dim2}, expected two dimensions")
    return first, second


@op("aten.diagonal_scatter.default")
def diagonal_scatter(self: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """`self` with `src` on a diagonal of two dimensions."""
    first, second = _diagonal_dims(self, dim1, dim2)
    rank = len(self.shape)
    rest = [dim for dim in range(rank) if dim not in (first, second)]
    rows, columns = self.shape[first], self.shape[second]
    length = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    expected = (*(self.shape[dim] for dim in rest), length)
    if src.shape != expected:
        raise OpRefusal(f"given {list(src.shape)}, expected the diagonal {list(expected)} of {list(self.shape)}")
    if not length:
        return self
    row, column = arange(self.trace, rows).reshape((rows, 1)), arange(self.trace, columns)
    value = _stored(src, self).realize().slice(len(rest), min(offset, 0), rows)
    inside = apply("and", row >= max(-offset, 0), row < max(-offset, 0) + length)
    hit = apply("and", apply("eq", row + offset, column), inside)
    turned = self.permute((*rest, first, second))
    mixed = where(hit, value.reshape((*value.shape, 1)), turned)
    order = (*rest, first, second)
    return mixed.permute(sorted(range(rank), key=order.__getitem__))


@view("aten.as_strided.default", "aten.as_strided_.default", lenses=lenses.as_strided)
def as_strided(self: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None) -> Tensor:
    """Elements of a contiguous tensor by strides, counted from `storage_offset` on."""
    view = _strided_view(self, size, stride, storage_offset)
    count = prod(self.shape)
    places = Tensor(self.trace, view.shape, INT64, Iota(view, INT64))
    if not prod(view.shape):
        return full(self.trace, view.shape, 0, self.dtype)
    return self.reshape((count,)).gather(0, places)


def _strided_view(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: Any) -> View:
    view = View(tuple(size), tuple(stride), offset or 0)
    last = view.offset + sum(step * (extent - 1) for step, extent in zip(stride, size, strict=True))
    if min([*size, *stride, view.offset]) < 0 or (prod(view.shape) > 0 and last >= prod(x.shape)):
        raise OpRefusal(
            f"given size={list(size)}, stride={list(stride)} and storage_offset={offset}, which leave the "
            f"{prod(x.shape)} elements of {list(x.shape)}"
        )
    return view


@op("aten.as_strided_scatter.default")
def as_strided_scatter(
    self: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None
) -> Tensor:
    """A contiguous tensor with `src` at the places that strides name, counted from `storage_offset` on."""
    view = _strided_view(self, size, stride, storage_offset)
    if src.shape != view.shape:
        raise OpRefusal(f"given {list(src.shape)}, expected {list(size)}")
    if lenses.overlaps(view.shape, view.strides):
        raise OpRefusal(f"given size={list(size)} and stride={list(stride)}, which bring several elements to one place")
    if not prod(view.shape):
        return self
    count = prod(self.shape)
    place = arange(self.trace, count)
    rest = apply("max", place - view.offset, 0)
    hit = place >= view.offset
    index: Tensor | None = None
    own = View(view.shape, tuple(prod(view.shape[dim + 1 :]) for dim in range(len(view.shape)))).strides
    steps = zip(view.strides, view.shape, own, strict=True)
    for step, extent, within in sorted((item for item in steps if item[1] > 1), reverse=True):
        along = apply("min", apply("div", rest, step) if step > 1 else rest, extent - 1)
        rest = rest - along * step
        index = along * within if index is None else index + along * within
    hit = apply("and", hit, apply("eq", rest, 0))
    flat = _stored(src, self).reshape((prod(view.shape),))
    value = flat.expand((count,)) if index is None else flat.gather(0, apply("min", index, prod(view.shape) - 1))
    return where(hit, value, self.reshape((count,))).reshape(self.shape)
