"""Resizing of lines, images and volumes: nearest, linear, cubic, and both of the latter with an antialiasing filter.

Positions are PyTorch's, computed as positions in a kernel; their bounds are known, so that none has to be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import FLOAT32, INT32
from npu_compiler.ops.padding import along
from npu_compiler.ops.registry import op
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, where

_IMAGES = {1: (3,), 2: (4,), 3: (5,)}
_MOST_PLACES = 1 << 24  # of a dimension: the compiler looks at each
_MAX_TAPS = 64  # of an antialiasing filter along a dimension


@dataclass(frozen=True)
class _Axis:
    """A dimension that is resized: its own size, the new one, and elements of the first for each of the second."""

    dim: int
    size: int
    out: int
    scale: float
    aligned: bool = False

    @property
    def stays(self) -> bool:
        return self.size == self.out and self.scale in (0.0, 1.0)


def _axes(x: Tensor, rank: int, output_size: Any, factors: Any, aligned: bool = False) -> list[_Axis]:
    """The resized dimensions, by their new sizes or by factors, which say how large they become.

    Raises:
        OpRefusal: There are neither, or another number of them, or nothing to resize.
    """
    if len(x.shape) != rank + 2:
        raise OpRefusal(f"given {len(x.shape)} dimensions, expected {rank + 2}")
    given = [None] * rank if not factors else [None if f is None else float(f) for f in factors]
    if output_size:
        out = list(output_size)
    elif None not in given:
        out = [int(size * factor) for size, factor in zip(x.shape[2:], given, strict=True) if factor is not None]
    else:
        raise OpRefusal("given neither output_size nor scale_factors")
    sizes = all(type(n) is int and 1 <= n <= _MOST_PLACES for n in out)
    if len(out) != rank or len(given) != rank or not sizes or 0 in x.shape[1:]:
        raise OpRefusal(f"given output_size={out} and factors {given} for {list(x.shape)}")
    found = []
    for axis, (size, new, factor) in enumerate(zip(x.shape[2:], out, given, strict=True)):
        if aligned:
            scale = (size - 1) / (new - 1) if new > 1 else 0.0
        else:
            scale = 1 / factor if factor is not None and factor > 0 else size / new
        found.append(_Axis(2 + axis, size, new, scale, aligned))
    return found


def _limited(place: Tensor, size: int) -> Tensor:
    return apply("min", apply("max", place, 0), size - 1)


def _numbers(x: Tensor, axis: _Axis) -> Tensor:
    return along(x, axis.dim, axis.out).cast(FLOAT32)


_Taps = Callable[[Tensor, _Axis], list[tuple[Tensor, Tensor | None]]]
"""What a position is made of along a dimension: places, and what each is multiplied by, if that is not 1."""


def _resized(x: Tensor, axes: Sequence[_Axis], taps: _Taps) -> Tensor:
    """Each element as the sum of those that all dimensions choose, each by the product of its weights."""

    def blended(rest: Sequence[list[tuple[Tensor, Tensor | None]]], places: dict[int, Tensor]) -> Tensor:
        if not rest:
            return source.at(places)
        result: Tensor | None = None
        for place, weight in rest[0]:
            part = blended(rest[1:], {**places, moved[len(places)].dim: place})
            part = part if weight is None else part * weight
            result = part if result is None else result + part
        assert result is not None
        return result

    moved, source = [axis for axis in axes if not axis.stays], x.realize()
    result = blended([taps(x, axis) for axis in moved], {})
    return x.trace.map(result.cast(x.dtype), role="image")


def _nearest(x: Tensor, axis: _Axis, shift: float) -> list[tuple[Tensor, Tensor | None]]:
    """The element whose place is that of the result times the scale, in float32, rounded down.

    Kernels round as they like where places are whole numbers but for the last digit: a line through the same steps
    that comes close to none of them gives the same.
    """
    numbers = np.arange(axis.out, dtype=np.float32)
    wanted = np.minimum(np.floor((numbers + np.float32(shift)) * np.float32(axis.scale)), axis.size - 1).astype(int)
    for further in (0.0, 0.5, 0.25, -0.25, 0.125, -0.125):
        slope, start = axis.scale, shift * axis.scale + further / axis.out
        if all(np.array_equal(_steps(numbers, slope, start, axis.size, kind), wanted) for kind in _KINDS):
            place = apply("floor", _numbers(x, axis) * float(np.float32(slope)) + float(np.float32(start)))
            return [(_limited(place.cast(INT32), axis.size), None)]
    raise OpRefusal(f"the places of {axis.out} elements among {axis.size} with the scale {axis.scale} are not certain")


_KINDS = (np.float32, np.float64)


def _steps(numbers: NDArray[Any], slope: float, start: float, size: int, kind: Any) -> NDArray[Any]:
    """The places that a line gives in a floating-point type; -1 where a rounding in float32 might move one."""
    line = numbers.astype(kind) * kind(np.float32(slope)) + kind(np.float32(start))
    error = 2.0**-22 * max(1.0, float(np.abs(line).max(initial=0)))
    low, high = np.floor(line - error), np.floor(line + error)
    places: NDArray[Any] = np.where(low == high, np.clip(np.floor(line), 0, size - 1), -1).astype(int)
    beyond = (low >= size - 1) | (high < 1)  # limited to the same place either way
    return np.where(beyond, np.clip(np.floor(line), 0, size - 1), places).astype(int)


def _source(x: Tensor, axis: _Axis) -> Tensor:
    """Where an element of the result lies among those of the operand, as a fraction."""
    numbers = _numbers(x, axis)
    return numbers * axis.scale if axis.aligned else (numbers + 0.5) * axis.scale - 0.5


def _linear(x: Tensor, axis: _Axis) -> list[tuple[Tensor, Tensor | None]]:
    place = apply("max", _source(x, axis), 0.0)
    first = apply("floor", place)
    share, start = place - first, first.cast(INT32)
    return [(_limited(start, axis.size), 1 - share), (_limited(start + 1, axis.size), share)]


def _keys(distance: Tensor, a: float, beyond: bool) -> Tensor:
    """The cubic convolution kernel within one element, or from one to two.

    Keys, "Cubic convolution interpolation for digital image processing", 1981.
    """
    if beyond:
        return ((distance * a - 5 * a) * distance + 8 * a) * distance - 4 * a
    return ((distance * (a + 2) - (a + 3)) * distance) * distance + 1


def _cubic(x: Tensor, axis: _Axis) -> list[tuple[Tensor, Tensor | None]]:
    place = _source(x, axis)
    first = apply("floor", place)
    share, start = place - first, first.cast(INT32)
    distances = ((share + 1, True), (share, False), (1 - share, False), (2 - share, True))
    weights = [_keys(distance, -0.75, beyond) for distance, beyond in distances]
    return [(_limited(start + (tap - 1), axis.size), weight) for tap, weight in enumerate(weights)]


def _triangle(distance: Tensor) -> Tensor:
    return apply("max", 1 - distance, 0.0)


def _smooth(distance: Tensor) -> Tensor:
    outer = where(distance < 2, _keys(distance, -0.5, True), 0.0)
    return where(distance < 1, _keys(distance, -0.5, False), outer)


def _filtered(x: Tensor, axis: _Axis, reach: float, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """One dimension resized by a kernel, stretched over all elements that an element of the result stands for."""
    stretch = max(axis.scale, 1.0)
    support = reach * stretch
    taps = ceil(support) * 2 + 1
    if taps > _MAX_TAPS:
        given = f"{axis.size} elements to become {axis.out} by a filter of {taps}"
        raise OpRefusal(f"given {given}, expected a filter of at most {_MAX_TAPS}")
    centre = (_numbers(x, axis) + 0.5) * axis.scale
    first = apply("max", (centre - support + 0.5).cast(INT32), 0)
    end = apply("min", (centre + support + 0.5).cast(INT32), axis.size)
    whole: Tensor | None = None
    result: Tensor | None = None
    source = x.realize()
    for tap in range(taps):
        place = first + tap
        distance = apply("abs", place.cast(FLOAT32) - centre + 0.5) * (1 / stretch)
        weight = where(place < end, kernel(distance), 0.0)
        part = source.at({axis.dim: _limited(place, axis.size)}) * weight
        whole = weight if whole is None else whole + weight
        result = part if result is None else result + part
    assert result is not None
    assert whole is not None
    return x.trace.map((result / whole).cast(x.dtype), role="image")


def _floating(x: Tensor) -> Tensor:
    if not x.dtype.is_float:
        raise OpRefusal(f"given {x.dtype}, expected floating point")
    return x


def _define(name: str, rank: int, documentation: str, compute: Callable[..., Tensor], aligns: bool) -> None:
    """Registers both overloads: sizes and factors as lists, or as one argument for each dimension."""
    traits: dict[str, Any] = {"image_ranks": _IMAGES[rank]}

    def by_lists(input: Tensor, output_size: Any = None, scale_factors: Any = None) -> Tensor:
        return compute(input, _axes(input, rank, output_size, scale_factors))

    def by_aligned_lists(
        input: Tensor, output_size: Any = None, align_corners: bool = False, scale_factors: Any = None
    ) -> Tensor:
        return compute(input, _axes(input, rank, output_size, scale_factors, bool(align_corners)))

    lists = by_aligned_lists if aligns else by_lists
    lists.__doc__ = documentation
    op(f"aten.{name}.vec", images={"input": "image"}, **traits)(lists)
    numbers = _NUMBERS[rank, aligns](rank, compute)
    numbers.__doc__ = documentation
    op(f"aten.{name}.default", images={"self": "image"}, **traits)(numbers)


def _of_line(rank: int, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def resize(self: Tensor, output_size: Any, scales: Any = None) -> Tensor:
        return compute(self, _axes(self, rank, output_size, [scales]))

    return resize


def _of_aligned_line(rank: int, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def resize(self: Tensor, output_size: Any, align_corners: bool, scales: Any = None) -> Tensor:
        return compute(self, _axes(self, rank, output_size, [scales], bool(align_corners)))

    return resize


def _of_image(rank: int, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def resize(self: Tensor, output_size: Any, scales_h: Any = None, scales_w: Any = None) -> Tensor:
        return compute(self, _axes(self, rank, output_size, [scales_h, scales_w]))

    return resize


def _of_aligned_image(rank: int, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def resize(
        self: Tensor, output_size: Any, align_corners: bool, scales_h: Any = None, scales_w: Any = None
    ) -> Tensor:
        return compute(self, _axes(self, rank, output_size, [scales_h, scales_w], bool(align_corners)))

    return resize


def _of_volume(rank: int, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def resize(
        self: Tensor, output_size: Any, scales_d: Any = None, scales_h: Any = None, scales_w: Any = None
    ) -> Tensor:
        return compute(self, _axes(self, rank, output_size, [scales_d, scales_h, scales_w]))

    return resize


def _of_aligned_volume(rank: int, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def resize(
        self: Tensor,
        output_size: Any,
        align_corners: bool,
        scales_d: Any = None,
        scales_h: Any = None,
        scales_w: Any = None,
    ) -> Tensor:
        return compute(self, _axes(self, rank, output_size, [scales_d, scales_h, scales_w], bool(align_corners)))

    return resize


_NUMBERS = {
    (1, False): _of_line,
    (1, True): _of_aligned_line,
    (2, False): _of_image,
    (2, True): _of_aligned_image,
    (3, False): _of_volume,
    (3, True): _of_aligned_volume,
}


def _by_nearest(x: Tensor, axes: Sequence[_Axis], shift: float) -> Tensor:
    return _resized(x, axes, partial(_nearest, shift=shift))


def _by_linear(x: Tensor, axes: Sequence[_Axis]) -> Tensor:
    return _resized(_floating(x), axes, _linear)


def _by_cubic(x: Tensor, axes: Sequence[_Axis]) -> Tensor:
    return _resized(_floating(x), axes, _cubic)


def _by_filter(x: Tensor, axes: Sequence[_Axis], reach: float, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """Along the width first, as in PyTorch, and then along the height."""
    result = _floating(x)
    for axis in reversed(axes):
        if not axis.stays:
            result = _filtered(result, axis, reach, kernel)
    return result


for _rank, _word in ((1, "lines"), (2, "images"), (3, "volumes")):
    _define(
        f"upsample_nearest{_rank}d", _rank, f"Resized {_word}: the element at the corner of each new one's place.",
        partial(_by_nearest, shift=0.0), aligns=False,
    )  # fmt: skip
    _define(
        f"_upsample_nearest_exact{_rank}d", _rank, f"Resized {_word}: the element amid each new one's place.",
        partial(_by_nearest, shift=0.5), aligns=False,
    )  # fmt: skip
for _rank, _name in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
    _define(
        f"upsample_{_name}", _rank, "Resized between the nearest elements, by linear interpolation.", _by_linear, True
    )
_define("upsample_bicubic2d", 2, "Resized images, by cubic interpolation (Keys).", _by_cubic, True)
_define(
    "_upsample_bilinear2d_aa", 2, "Resized images, by a triangular filter as wide as what an element stands for.",
    partial(_by_filter, reach=1.0, kernel=_triangle), True,
)  # fmt: skip
_define(
    "_upsample_bicubic2d_aa", 2, "Resized images, by a cubic filter as wide as what an element stands for.",
    partial(_by_filter, reach=2.0, kernel=_smooth), True,
)  # fmt: skip
