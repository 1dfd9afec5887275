"""Ops that give the same elements another shape or order: strides where they can say it, a copy where they can't."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from npu_compiler.integers import ceil_div
from npu_compiler.ops.registry import op
from npu_compiler.symbolic import OpRefusal, Tensor, normalize_dim


@op(
    "aten.alias.default",
    "aten.detach.default",
    "aten.detach_.default",
    "aten.contiguous.default",
    "aten.lift_fresh.default",
)
def alias(self: Tensor, memory_format: Any = None) -> Tensor:
    """The tensor itself: memory format and aliasing change no value."""
    return self


@op("aten.clone.default", "aten.lift_fresh_copy.default")
def clone(self: Tensor, memory_format: Any = None) -> Tensor:
    """The same elements in memory of their own."""
    return self


@op("aten.dropout.default", "aten.dropout_.default", "aten.feature_dropout.default")
def dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """The tensor itself, in evaluation mode."""
    if train and p:
        raise OpRefusal(f"given train=True with p={p}, expected evaluation mode; call model.eval() before extraction")
    return input


@op("aten.transpose.int")
def transpose(self: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two dimensions exchanged."""
    return self.swap(dim0, dim1)


@op("aten.swapaxes.default")
def swapaxes(self: Tensor, axis0: int, axis1: int) -> Tensor:
    """Two dimensions exchanged."""
    return self.swap(axis0, axis1)


@op("aten.t.default", "aten.numpy_T.default")
def t(self: Tensor) -> Tensor:
    """A matrix transposed; a vector as it is."""
    if len(self.shape) > 2:
        raise OpRefusal(f"given {len(self.shape)} dimensions, expected at most 2")
    return self.swap(0, 1) if len(self.shape) == 2 else self


@op("aten.permute.default")
def permute(self: Tensor, dims: Sequence[int]) -> Tensor:
    """The dimensions in another order."""
    return self.permute(dims)


@op("aten.movedim.int")
def movedim(self: Tensor, source: int, destination: int) -> Tensor:
    """One dimension moved to another place."""
    rank = len(self.shape)
    order = [d for d in range(rank) if d != normalize_dim(source, rank)]
    order.insert(normalize_dim(destination, rank), normalize_dim(source, rank))
    return self.permute(order)


@op("aten.reshape.default")
def reshape(self: Tensor, shape: Sequence[int]) -> Tensor:
    """Another shape of the same elements."""
    return self.reshape(shape)


@op("aten.view.default", "aten._unsafe_view.default")
def view(self: Tensor, size: Sequence[int]) -> Tensor:
    """Another shape of the same elements."""
    return self.reshape(size)


@op("aten.view_as.default", "aten.reshape_as.default")
def view_as(self: Tensor, other: Tensor) -> Tensor:
    """The shape of another tensor."""
    return self.reshape(other.shape)


@op("aten.flatten.using_ints")
def flatten(self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """The dimensions from `start_dim` to `end_dim` as one."""
    if not self.shape:
        return self.reshape((1,))
    first, last = normalize_dim(start_dim, len(self.shape)), normalize_dim(end_dim, len(self.shape))
    if first > last:
        raise OpRefusal(f"given start_dim={start_dim} after end_dim={end_dim}")
    return self.reshape((*self.shape[:first], prod(self.shape[first : last + 1]), *self.shape[last + 1 :]))


@op("aten.unflatten.int")
def unflatten(self: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """One dimension as several."""
    dim = normalize_dim(dim, len(self.shape))
    own = list(sizes)
    if -1 in own:
        own[own.index(-1)] = self.shape[dim] // prod(size for size in own if size != -1)
    return self.reshape((*self.shape[:dim], *own, *self.shape[dim + 1 :]))


@op("aten.unsqueeze.default", "aten.unsqueeze_.default")
def unsqueeze(self: Tensor, dim: int) -> Tensor:
    """A new dimension of size 1."""
    dim = normalize_dim(dim, len(self.shape) + 1)
    return self.reshape((*self.shape[:dim], 1, *self.shape[dim:]))


@op("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def squeeze(self: Tensor, dim: Any = None) -> Tensor:
    """Without the dimensions of size 1: all of them, or those that `dim` names."""
    rank = len(self.shape)
    chosen = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    dropped = {normalize_dim(d, rank) for d in chosen}
    return self.reshape([size for d, size in enumerate(self.shape) if not (size == 1 and d in dropped)])


@op("aten.expand.default")
def expand(self: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    """Repeated along dimensions of size 1, and along new leading ones."""
    return self.expand(size)


@op("aten.expand_as.default")
def expand_as(self: Tensor, other: Tensor) -> Tensor:
    """Repeated to the shape of another tensor."""
    return self.expand(other.shape)


@op("aten.broadcast_to.default")
def broadcast_to(self: Tensor, size: Sequence[int]) -> Tensor:
    """Repeated to a shape."""
    return self.expand(size)


@op("aten.slice.Tensor")
def slice_(self: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor:
    """Elements `start` to `end` of a dimension, `step` apart; negative bounds count from the end."""
    size = self.shape[normalize_dim(dim, len(self.shape))]
    if step < 1:
        raise OpRefusal(f"given step={step}, expected at least 1")
    first, last, _ = slice(start, end, step).indices(size)
    return self.slice(dim, first, max(0, ceil_div(last - first, step)), step)


@op("aten.narrow.default")
def narrow(self: Tensor, dim: int, start: int, length: int) -> Tensor:
    """`length` elements of a dimension."""
    size = self.shape[normalize_dim(dim, len(self.shape))]
    first = start + size if start < 0 else start
    if not 0 <= first <= first + length <= size:
        raise OpRefusal(f"given start={start} and length={length}, which leave a dimension of {size}")
    return self.slice(dim, first, length)


@op("aten.select.int")
def select(self: Tensor, dim: int, index: int) -> Tensor:
    """One position of a dimension, which is dropped."""
    dim = normalize_dim(dim, len(self.shape))
    size = self.shape[dim]
    if not -size <= index < size:
        raise OpRefusal(f"given index={index}, expected one of {size}")
    return self.slice(dim, index % size, 1).reshape((*self.shape[:dim], *self.shape[dim + 1 :]))


def _pieces(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    if sum(sizes) != x.shape[normalize_dim(dim, len(x.shape))]:
        raise OpRefusal(f"given pieces of {list(sizes)}, which do not add up to the dimension")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(x.slice(dim, start, size) for start, size in zip(starts, sizes, strict=True))


@op("aten.split.Tensor")
def split(self: Tensor, split_size: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of `split_size` along a dimension; the last may be smaller."""
    size = self.shape[normalize_dim(dim, len(self.shape))]
    if split_size < 1:
        raise OpRefusal(f"given split_size={split_size}, expected at least 1")
    return _pieces(self, [min(split_size, size - start) for start in range(0, size, split_size)], dim)


@op("aten.split_with_sizes.default")
def split_with_sizes(self: Tensor, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of the given sizes along a dimension."""
    return _pieces(self, split_sizes, dim)


@op("aten.chunk.default")
def chunk(self: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """At most `chunks` pieces of equal size along a dimension."""
    size = self.shape[normalize_dim(dim, len(self.shape))]
    return split(self, max(1, ceil_div(size, max(1, chunks))), dim)


@op("aten.unbind.int")
def unbind(self: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Every position of a dimension as a tensor of its own."""
    size = self.shape[normalize_dim(dim, len(self.shape))]
    return tuple(select(self, dim, i) for i in range(size))
