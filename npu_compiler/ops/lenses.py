"""How views lie in what they are views of. A definition names its rule beside its arithmetic.

A lens takes a view out of a whole, and puts other elements back where the view lies: that is what an op that changes
memory in place through a view comes to, once nothing shares memory. Views of views are lenses behind lenses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from npu_compiler.dtypes import DType
from npu_compiler.tensor.layout import dense
from npu_compiler.tensor.view import View

__all__ = ["COPY_IN_ORDER", "REPEATED", "Lens", "LensRule", "Spelling", "ViewCall"]
__all__ += ["along", "as_strided", "complex_part", "diagonal", "expanded", "itself", "other_bits", "overlaps"]
__all__ += ["paired", "part", "pieces", "position", "positions", "reshaped", "strided", "turned", "windows"]

Shape = tuple[int, ...]
Spelling = tuple[str, Mapping[str, Any]]
"""An op and its attributes."""


COPY_IN_ORDER: Spelling = ("aten.clone.default", {"memory_format": "contiguous_format"})
"""Puts the elements of a tensor into row-major order."""

REPEATED = "several of its elements are one place in memory; clone the tensor before changing it"


@dataclass(frozen=True)
class ViewCall:
    """A node that makes views of its first operand.

    Attributes:
        attrs: Its attributes, those at their defaults left out.
        given, given_dtype: Of that operand.
        made: Shapes of all its results.
        place: Which of them is asked about.
        dtype: Of the results.
        offset: Where the operand begins in its memory, counted in elements.
    """

    attrs: Mapping[str, Any]
    given: Shape
    given_dtype: DType
    made: Sequence[Shape]
    place: int
    dtype: DType
    offset: int = 0

    @property
    def shape(self) -> Shape:
        return self.made[self.place]

    def dim(self, key: str = "dim", default: int = 0) -> int:
        """An attribute that names a dimension of the operand, counted from the front."""
        return int(self.attrs.get(key, default)) % max(len(self.given), 1)


@dataclass(frozen=True)
class Lens:
    """How a view lies in a whole.

    Attributes:
        shape, dtype: Of the view.
        take: The op that takes it; it reads the whole.
        put: The op that gives the whole with other elements where the view lies. It reads the whole and the part, or
            the part alone where the view has all elements.
        has_all: Whether it has all elements of the whole.
        lies: Where the elements of the view lie, by where those of the whole do; None where that is not known.
        refusal: Why nothing can be put back; empty where it can.
        takes_one_value: Whether one value for all elements can be put back all the same.
        of_storage: Whether it is a view of the memory as such, whatever the whole is a view of.
        in_order: Whether these ops take what they read to lie in row-major order.
    """

    shape: Shape
    dtype: DType
    take: Spelling
    put: Spelling
    has_all: bool = False
    lies: Callable[[View], View | None] = field(default=lambda view: None, compare=False)
    refusal: str = ""
    takes_one_value: bool = False
    of_storage: bool = False
    in_order: bool = False


LensRule = Callable[[ViewCall], Sequence[Lens] | None]
"""The lenses from the operand to the view, from the outside; none at all where it is the operand itself, and None where
nobody knows how it lies there."""


def itself(call: ViewCall) -> Sequence[Lens]:
    """The operand itself."""
    return ()


def reshaped(call: ViewCall) -> Sequence[Lens]:
    """All elements in their order, under another shape."""
    return [_reshape(call.given, call.shape, call.dtype)] if call.shape != call.given else []


def _reshape(given: Shape, made: Shape, dtype: DType) -> Lens:
    back, name = {"shape": list(given)}, "aten.reshape.default"
    return Lens(made, dtype, (name, {"shape": list(made)}), (name, back), True, lambda view: view.reshape(made))


def turned(turn: Callable[[Mapping[str, Any], int], Sequence[int]]) -> LensRule:
    """The dimensions in another order."""

    def rule(call: ViewCall) -> Sequence[Lens]:
        order = tuple(int(dim) for dim in turn(call.attrs, len(call.given)))
        return [_permute(order, call)] if order != tuple(range(len(order))) else []

    return rule


def _permute(order: Shape, call: ViewCall) -> Lens:
    inverse, name = sorted(range(len(order)), key=order.__getitem__), "aten.permute.default"
    shape = tuple(call.given[dim] for dim in order)
    take, put = (name, {"dims": list(order)}), (name, {"dims": inverse})
    return Lens(shape, call.dtype, take, put, True, lambda view: view.permute(order))


def expanded(call: ViewCall) -> Sequence[Lens]:
    """Repeated along dimensions of size 1: memory of which nothing can be changed, but where nothing is repeated."""
    if prod(call.shape) == prod(call.given):
        return reshaped(call)
    take = ("aten.expand.default", {"size": list(call.shape)})
    own = dense(call.shape).strides[len(call.shape) - len(call.given) :]
    first = ("aten.as_strided.default", {"size": list(call.given), "stride": list(own), "storage_offset": 0})

    def lies(view: View) -> View:
        return view.expand(call.shape)

    return [Lens(call.shape, call.dtype, take, first, True, lies, REPEATED, True, in_order=True)]


def along(positions: Callable[[Mapping[str, Any], int], range]) -> LensRule:
    """Positions of the dimension `dim`, by the attributes and the dimension's size."""

    def rule(call: ViewCall) -> Sequence[Lens]:
        dim = call.dim()
        taken = positions(call.attrs, call.given[dim])
        return [part(call.given, dim, taken, call.dtype)] if len(taken) < call.given[dim] else []

    return rule


def part(given: Shape, dim: int, taken: range, dtype: DType) -> Lens:
    """Positions of a dimension."""
    shape = (*given[:dim], len(taken), *given[dim + 1 :])
    attrs = {"dim": dim, "start": taken.start, "end": max(taken.start, taken.stop), "step": taken.step}

    def lies(view: View) -> View:
        return view.slice(dim, taken.start, len(taken), taken.step)

    return Lens(shape, dtype, ("aten.slice.Tensor", attrs), ("aten.slice_scatter.default", attrs), lies=lies)


def position(call: ViewCall) -> Sequence[Lens]:
    """One position of the dimension `dim`, which is gone."""
    dim = call.dim()
    return [_position(call.given, dim, int(call.attrs["index"]) % max(call.given[dim], 1), call.dtype)]


def _position(given: Shape, dim: int, index: int, dtype: DType) -> Lens:
    shape = (*given[:dim], *given[dim + 1 :])
    attrs = {"dim": dim, "index": index}

    def lies(view: View) -> View | None:
        return view.slice(dim, index, 1, 1).reshape(shape)

    return Lens(shape, dtype, ("aten.select.int", attrs), ("aten.select_scatter.default", attrs), lies=lies)


def positions(call: ViewCall) -> Sequence[Lens]:
    """Each position of the dimension `dim` by itself."""
    return [_position(call.given, call.dim(), call.place, call.dtype)]


def pieces(call: ViewCall) -> Sequence[Lens]:
    """Pieces along the dimension `dim`, one after another."""
    dim = call.dim()
    start = sum(shape[dim] for shape in call.made[: call.place])
    return [part(call.given, dim, range(start, start + call.shape[dim]), call.dtype)]


def diagonal(call: ViewCall) -> Sequence[Lens]:
    """A diagonal of two dimensions, as the last one."""
    rank = len(call.given)
    first, second = call.dim("dim1") % rank, call.dim("dim2", 1) % rank
    offset = int(call.attrs.get("offset", 0))
    attrs = {"offset": offset, "dim1": first, "dim2": second}

    def lies(view: View) -> View:
        rest = [dim for dim in range(rank) if dim not in (first, second)]
        start = max(-offset, 0) * view.strides[first] + max(offset, 0) * view.strides[second]
        strides = (*(view.strides[dim] for dim in rest), view.strides[first] + view.strides[second])
        return View(call.shape, strides, view.offset + (start if prod(call.shape) else 0))

    take, put = ("aten.diagonal.default", attrs), ("aten.diagonal_scatter.default", attrs)
    return [Lens(call.shape, call.dtype, take, put, lies=lies)]


def as_strided(call: ViewCall) -> Sequence[Lens]:
    """Elements of the memory by strides, whatever the operand is a view of."""
    given = call.attrs.get("storage_offset")
    offset = call.offset if given is None else int(given)
    size, stride = ([int(item) for item in call.attrs[key]] for key in ("size", "stride"))
    return [replace(strided(tuple(size), tuple(stride), offset, call.dtype), of_storage=True)]


def windows(call: ViewCall) -> Sequence[Lens]:
    """Windows along a dimension, as a last dimension; where they overlap, nothing of them can be changed."""
    dim, step = call.dim("dimension"), int(call.attrs["step"])
    if not call.given:
        return reshaped(call)
    whole = View(call.given, dense(call.given).strides)

    def lies(view: View) -> View:
        strides = [stride * (step if d == dim else 1) for d, stride in enumerate(view.strides)]
        return View(call.shape, (*strides, view.strides[dim]), view.offset)

    lens = strided(call.shape, lies(whole).strides, 0, call.dtype)
    return [replace(lens, lies=lies)]


def strided(size: Shape, stride: Shape, offset: int, dtype: DType) -> Lens:
    """Elements of a whole by strides, which lies in row-major order."""
    attrs = {"size": list(size), "stride": list(stride), "storage_offset": offset}
    take, put = ("aten.as_strided.default", attrs), ("aten.as_strided_scatter.default", attrs)
    refusal = REPEATED if overlaps(size, stride) else ""

    def lies(view: View) -> View:
        return View(size, stride, offset)

    return Lens(size, dtype, take, put, lies=lies, refusal=refusal, in_order=True)


def overlaps(size: Shape, stride: Shape) -> bool:
    """Whether strides might bring two positions to one place: each has to reach beyond all that are shorter."""
    reach = 0
    for step, count in sorted((step, count) for step, count in zip(stride, size, strict=True) if count > 1):
        if step <= reach:
            return prod(size) > 0
        reach += step * (count - 1)
    return False


def paired(call: ViewCall) -> Sequence[Lens]:
    """Complex numbers as pairs, or pairs as complex numbers: each is the inverse of the other."""
    as_pairs: Spelling = ("aten.view_as_real.default", {})
    as_numbers: Spelling = ("aten.view_as_complex.default", {})
    made_pairs = len(call.shape) > len(call.given)
    take, put = (as_pairs, as_numbers) if made_pairs else (as_numbers, as_pairs)
    return [Lens(call.shape, call.dtype, take, put, True)]


def complex_part(index: int) -> LensRule:
    """The real or the imaginary part of complex numbers; of real ones, themselves."""

    def rule(call: ViewCall) -> Sequence[Lens]:
        if call.dtype == call.given_dtype:
            return ()
        both = ViewCall({}, call.given, call.given_dtype, [(*call.given, 2)], 0, call.dtype)
        return [*paired(both), _position(both.shape, len(call.given), index, call.dtype)]

    return rule


def other_bits(call: ViewCall) -> Sequence[Lens] | None:
    """The same bits read as another data type of the same size."""
    if call.dtype.size != call.given_dtype.size or call.shape != call.given:
        return None
    name = "aten.view.dtype"
    take, put = ((name, {"dtype": kind.name}) for kind in (call.dtype, call.given_dtype))
    return [Lens(call.shape, call.dtype, take, put, True, lambda view: view)]
