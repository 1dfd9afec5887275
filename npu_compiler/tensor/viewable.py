"""Views: what is seen under another shape, in another order or in part, without any arithmetic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Self

from npu_compiler.tensor.shapes import OpRefusal, normalize_dim
from npu_compiler.tensor.view import Step

__all__ = ["Viewable"]


class Viewable(ABC):
    """What has a shape, and can be seen by a `Step` under another one."""

    __slots__ = ()
    shape: tuple[int, ...]

    @abstractmethod
    def _view(self, shape: tuple[int, ...], step: Step) -> Self:
        """The same elements under `shape`, as a step leads there."""

    def permute(self, dims: Sequence[int]) -> Self:
        order = tuple(normalize_dim(d, len(self.shape)) for d in dims)
        if sorted(order) != list(range(len(self.shape))):
            raise OpRefusal(f"given dims={list(dims)}, expected a permutation of {len(self.shape)} dimensions")
        if order == tuple(range(len(order))):
            return self
        return self._view(tuple(self.shape[d] for d in order), ("permute", order))

    def swap(self, dim0: int, dim1: int) -> Self:
        """Transposes two dimensions."""
        rank = len(self.shape)
        order = list(range(rank))
        if rank:
            a, b = normalize_dim(dim0, rank), normalize_dim(dim1, rank)
            order[a], order[b] = order[b], order[a]
        return self.permute(order)

    def move_last(self, dim: int) -> Self:
        """The dimension `dim` moved to the end."""
        rank = len(self.shape)
        dim = normalize_dim(dim, rank)
        return self.permute([*(d for d in range(rank) if d != dim), dim]) if rank else self

    def move_from_last(self, dim: int) -> Self:
        """The inverse of `move_last`."""
        rank = len(self.shape)
        order = list(range(rank - 1))
        order.insert(normalize_dim(dim, rank), rank - 1)
        return self.permute(order) if rank else self

    def reshape(self, shape: Sequence[int]) -> Self:
        """Another shape of the same number of elements; one size may be -1."""
        sizes = list(shape)
        if sizes.count(-1) == 1:
            rest = prod(size for size in sizes if size != -1)
            if rest:
                sizes[sizes.index(-1)] = prod(self.shape) // rest
        if any(size < 0 for size in sizes) or prod(sizes) != prod(self.shape):
            raise OpRefusal(f"given the shape {list(shape)}, which does not hold the elements of {list(self.shape)}")
        new = tuple(sizes)
        return self if new == self.shape else self._view(new, ("reshape", new))

    def expand(self, shape: Sequence[int]) -> Self:
        """Broadcasts to `shape`; -1 keeps a size."""
        lead = len(shape) - len(self.shape)
        own = (1,) * lead + self.shape
        if lead < 0:
            raise OpRefusal(f"given {list(shape)}, expected at least {len(self.shape)} dimensions")
        new = tuple(o if s == -1 else s for s, o in zip(shape, own, strict=True))
        if any(o not in (1, n) for o, n in zip(own, new, strict=True)):
            raise OpRefusal(f"{list(self.shape)} does not broadcast to {list(shape)}")
        return self if new == self.shape else self._view(new, ("expand", new))

    def slice(self, dim: int, start: int, length: int, step: int = 1) -> Self:
        """`length` elements from `start`, `step` apart. Outside of the tensor they may be named, not read."""
        dim = normalize_dim(dim, len(self.shape))
        if (start, length, step) == (0, self.shape[dim], 1):
            return self
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self._view(shape, ("slice", (dim, start, length, step)))

    def flip(self, *dims: int) -> Self:
        """Backwards along dimensions."""
        result = self
        for dim in dims:
            size = self.shape[dim]
            result = result.slice(dim, size - 1, size, -1) if size > 1 else result
        return result

    def window(self, dim: int, count: int, step: int, size: int, dilation: int = 1) -> Self:
        """`count` windows along a dimension, `step` apart, in its place; their `size` taps come last."""
        dim = normalize_dim(dim, len(self.shape))
        shape = (*self.shape[:dim], count, *self.shape[dim + 1 :], size)
        return self._view(shape, ("window", (dim, count, step, size, dilation)))
