"""Elements in other places: repeats, shuffles, rolls. All are views of views, but for the copy at the end."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from npu_compiler.ops.indexing import cat
from npu_compiler.ops.registry import op
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import OpRefusal, Tensor


@op("aten.tile.default")
def tile(self: Tensor, dims: Sequence[int]) -> Tensor:
    """All of a tensor, so many times along each dimension, the last ones where there are fewer of them than it has."""
    return repeat(self, [*(1 for _ in range(len(self.shape) - len(dims))), *dims])


@op("aten.repeat.default")
def repeat(self: Tensor, repeats: Sequence[int]) -> Tensor:
    """All of a tensor, so many times along each dimension; there may be more of them than it has, ahead of its own."""
    own = (*(1,) * (len(repeats) - len(self.shape)), *self.shape)
    apart = self.reshape([size for extent in own for size in (1, extent)])
    repeated = apart.expand([size for pair in zip(repeats, own, strict=True) for size in pair])
    return repeated.reshape([count * extent for count, extent in zip(repeats, own, strict=True)])


@op("aten.pixel_shuffle.default")
def pixel_shuffle(self: Tensor, upscale_factor: int) -> Tensor:
    """[..., C * r * r, H, W] as [..., C, H * r, W * r]: of r * r channels each a pixel of a square."""
    r, (*outer, channels, height, width) = upscale_factor, self.shape
    squares = self.reshape((prod(outer), channels // (r * r), r, r, height, width))
    return squares.permute((0, 1, 4, 2, 5, 3)).reshape((*outer, channels // (r * r), height * r, width * r))


@op("aten.pixel_unshuffle.default")
def pixel_unshuffle(self: Tensor, downscale_factor: int) -> Tensor:
    """The inverse of a pixel shuffle: [..., C, H * r, W * r] as [..., C * r * r, H, W]."""
    r, (*outer, channels, height, width) = downscale_factor, self.shape
    squares = self.reshape((prod(outer), channels, height // r, r, width // r, r))
    return squares.permute((0, 1, 3, 5, 2, 4)).reshape((*outer, channels * r * r, height // r, width // r))


@op("aten.channel_shuffle.default")
def channel_shuffle(self: Tensor, groups: int) -> Tensor:
    """Channels [N, G * K, ...] as [N, K * G, ...]: the first of each group, then the second of each."""
    batch, channels, *rest = self.shape
    return self.reshape((batch, groups, channels // groups, *rest)).swap(1, 2).reshape(self.shape)


@op("aten.roll.default")
def roll(self: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Moved along dimensions, what leaves at one end coming in at the other; along all in a row where none is named."""
    if not dims:
        if len(shifts) != 1:
            raise OpRefusal(f"given {len(shifts)} shifts and no dimension, expected one")
        return roll(self.reshape((prod(self.shape),)), shifts, (0,)).reshape(self.shape)
    if len(shifts) != len(dims):
        raise OpRefusal(f"given {len(shifts)} shifts for {len(dims)} dimensions, expected as many")
    for shift, named in zip(shifts, dims, strict=True):
        dim = normalize_dim(named, len(self.shape))
        first = -shift % self.shape[dim] if self.shape[dim] else 0
        if first:
            rest = self.shape[dim] - first
            self = cat([self.slice(dim, first, rest), self.slice(dim, 0, first)], dim)
    return self
