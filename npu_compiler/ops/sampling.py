"""Samples of images at computed places: grids of an affine map, and interpolation between neighbours.

Places are computed in float32, neighbours are gathered where they lie; one kernel does both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from npu_compiler.dtypes import FLOAT32, INT32
from npu_compiler.ops.pointwise import round_
from npu_compiler.ops.registry import op
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, full, where

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)
_SHARPNESS = -0.75  # of the cubic convolution


@op("aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """Images [N, C, (D,) H, W] at the places of a grid [N, ..., 2 or 3], the last of which run from -1 to 1.

    Between pixels: linear (0), that of the nearest (1) or cubic (2, of images alone). Beyond the borders: zeros (0),
    the border's pixel (1), or the image reflected (2).
    """
    axes = len(input.shape) - 2
    if axes not in (2, 3) or len(grid.shape) != axes + 2 or grid.shape[-1] != axes or grid.shape[0] != input.shape[0]:
        raise OpRefusal(f"given an image {list(input.shape)} and a grid {list(grid.shape)}, which do not go together")
    if interpolation_mode not in range(3) or padding_mode not in range(3):
        raise OpRefusal(f"given interpolation_mode={interpolation_mode} and padding_mode={padding_mode}")
    if interpolation_mode == _BICUBIC and axes == 3:
        raise OpRefusal("given interpolation_mode=2 (bicubic) for volumes, expected images of 4 dimensions")
    if 0 in input.shape[1:]:
        raise OpRefusal(f"given an image {list(input.shape)} of no pixels")
    image, result = input.realize(), (input.shape[0], 1, *grid.shape[1:-1])
    whole = (*input.shape[:2], *grid.shape[1:-1])  # places are as wide as the result, so that all shares are of them
    places = []
    for axis, size in enumerate(input.shape[2:]):
        coordinate = grid.slice(-1, axes - 1 - axis, 1)  # the last comes first
        along = coordinate.reshape(result).expand(whole).cast(FLOAT32)
        place = (along + 1) * ((size - 1) / 2) if align_corners else ((along + 1) * size - 1) * 0.5
        if interpolation_mode != _BICUBIC:
            place = _inside(place, size, padding_mode, align_corners)
        places.append(place)
    neighbours = _NEIGHBOURS[interpolation_mode]
    total: Tensor | None = None
    for corner in product(*(neighbours(place) for place in places)):
        weight: Tensor | None = None
        valid: Tensor | None = None
        at: dict[int, Tensor] = {}
        for axis, (place, share) in enumerate(corner):
            size = input.shape[2 + axis]
            if interpolation_mode == _BICUBIC:
                place = _inside(place, size, padding_mode, align_corners)
            weight = share if weight is None or share is None else weight * share
            if padding_mode == _ZEROS:
                held = apply("and", place >= 0, place < size)
                valid = held if valid is None else apply("and", valid, held)
            bounded = apply("min", apply("max", place, 0.0), float(size - 1)).cast(INT32)
            at[2 + axis] = apply("min", apply("max", bounded, 0), size - 1)  # whatever NaN has become
        value = image.pick(at).cast(FLOAT32)
        value = value if weight is None else value * weight
        value = value if valid is None else where(valid, value, 0.0)
        total = value if total is None else total + value
    assert total is not None
    return total.cast(input.dtype)


Neighbour = tuple[Tensor, Tensor | None]
"""The place of a pixel along a dimension, a whole number in float32, and its share in the result; None for all."""


def _of_line(place: Tensor) -> list[Neighbour]:
    low = apply("floor", place)
    share = place - low
    return [(low, 1 - share), (low + 1, share)]


def _of_nearest(place: Tensor) -> list[Neighbour]:
    return [(round_(place), None)]


def _of_cubic(place: Tensor) -> list[Neighbour]:
    """Four neighbours by cubic convolution (Keys, 1981)."""
    low, a = apply("floor", place), _SHARPNESS
    t = place - low

    def near(x: Tensor) -> Tensor:
        return ((x * (a + 2) - (a + 3)) * x) * x + 1

    def far(x: Tensor) -> Tensor:
        return ((x * a - 5 * a) * x + 8 * a) * x - 4 * a

    return [(low - 1, far(t + 1)), (low, near(t)), (low + 1, near(1 - t)), (low + 2, far(2 - t))]


_NEIGHBOURS: Sequence[Callable[[Tensor], list[Neighbour]]] = (_of_line, _of_nearest, _of_cubic)


def _inside(place: Tensor, size: int, padding_mode: int, align_corners: bool) -> Tensor:
    """A place brought into the image, where places beyond it are not zero."""
    if padding_mode == _ZEROS:
        return place
    if padding_mode == _REFLECTION:
        low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        span = high - low
        if span == 0:
            return full(place.trace, place.shape, 0.0, FLOAT32)
        away = apply("abs", place - low)
        rest = apply("fmod", away, span)
        flips = apply("floor", away / span)
        odd = apply("ne", apply("fmod", flips, 2.0), 0.0)
        place = where(odd, span - rest, rest) + low
    return apply("min", apply("max", place, 0.0), float(size - 1))


@op("aten.affine_grid_generator.default")
def affine_grid_generator(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """The grid [N, (D,) H, W, 2 or 3] that maps [N, 2, 3] or [N, 3, 4] give of the pixels of images of a size."""
    _, _, *sizes = size
    axes = len(sizes)
    if theta.shape != (size[0], axes, axes + 1):
        raise OpRefusal(f"given maps {list(theta.shape)} for images {list(size)}, expected {[size[0], axes, axes + 1]}")
    maps = theta.reshape((size[0], *(1,) * axes, axes, axes + 1)).cast(FLOAT32)

    def factor(column: int) -> Tensor:
        return maps.slice(-1, column, 1).reshape((size[0], *(1,) * axes, axes))

    total = factor(axes)
    for column, extent in enumerate(reversed(sizes)):
        steps = arange(theta.trace, extent).cast(FLOAT32)
        if not align_corners:
            place = (steps * 2 + 1) * (1 / extent) - 1
        else:
            place = steps * (2 / (extent - 1)) - 1 if extent > 1 else steps * 0.0
        total = total + factor(column) * place.reshape((extent, *(1,) * (column + 1)))
    return total.cast(theta.dtype)
