"""Elements by the values of integer tensors, beyond plain indexing: flat positions, bags of rows, counts of repeats."""

from __future__ import annotations

from math import prod
from typing import Any

from npu_compiler.dtypes import INT64
from npu_compiler.ops.indexing import embedding, gather, indices_of
from npu_compiler.ops.registry import op
from npu_compiler.ops.scans import cumsum
from npu_compiler.ops.scattering import reduced_rows
from npu_compiler.tensor.shapes import broadcast_shapes, normalize_dim
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, full, where


@op("aten.take.default")
def take(self: Tensor, index: Tensor) -> Tensor:
    """Elements by their position in row-major order; negative ones count from the end."""
    flat = self.reshape((prod(self.shape),))
    places = indices_of(index).within(flat.shape[0], wraps=True)
    return flat.pick({0: places}, (1,) * len(index.shape))


@op("aten.take_along_dim.default")
def take_along_dim(self: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """As `gather`, but the dimensions beside `dim` broadcast; without one, positions in row-major order."""
    if dim is None:
        return gather(self.reshape((prod(self.shape),)), 0, indices.reshape((prod(indices.shape),)))
    if len(self.shape) != len(indices.shape):
        raise OpRefusal(f"given indices of {len(indices.shape)} dimensions for a tensor of {len(self.shape)}")
    dim = normalize_dim(dim, len(self.shape))
    both = broadcast_shapes(*((*t.shape[:dim], 1, *t.shape[dim + 1 :]) for t in (self, indices)))
    own, theirs = ((*both[:dim], t.shape[dim], *both[dim + 1 :]) for t in (self, indices))
    return gather(self.expand(own), dim, indices.expand(theirs))


@op("aten.one_hot.default")
def one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
    """A row of `num_classes` for each number, 1 at that position and else 0, int64."""
    if num_classes < 1:
        raise OpRefusal("given no num_classes: the shape depends on the values; name the number of classes")
    places = indices_of(self).within(num_classes).reshape((*self.shape, 1))
    return apply("eq", places, arange(self.trace, num_classes)).cast(INT64)


@op("aten.repeat_interleave.self_int")
def repeat_interleave(self: Tensor, repeats: int, dim: int | None = None, output_size: int | None = None) -> Tensor:
    """Each position of a dimension so many times in a row; of all elements in row-major order without one."""
    if dim is None:
        return repeat_interleave(self.reshape((prod(self.shape),)), repeats, 0)
    dim = normalize_dim(dim, len(self.shape))
    before, after = self.shape[: dim + 1], self.shape[dim + 1 :]
    repeated = self.reshape((*before, 1, *after)).expand((*before, repeats, *after))
    return repeated.reshape((*before[:-1], before[-1] * repeats, *after))


@op("aten.repeat_interleave.Tensor")
def repeat_interleave_positions(repeats: Tensor, output_size: int | None = None) -> Tensor:
    """Position i `repeats[i]` times in a row, int64; `output_size` is the sum of `repeats`."""
    return _repeated(repeats, output_size).cast(INT64)


@op("aten.repeat_interleave.self_Tensor")
def repeat_interleave_each(
    self: Tensor, repeats: Tensor, dim: int | None = None, output_size: int | None = None
) -> Tensor:
    """Position i of a dimension `repeats[i]` times in a row; `output_size` is the sum of `repeats`."""
    x = self.reshape((prod(self.shape),)) if dim is None else self
    dim = normalize_dim(dim or 0, len(x.shape))
    if repeats.shape in ((), (1,)):
        repeats = repeats.reshape((1,)).expand((x.shape[dim],))
    if repeats.shape != (x.shape[dim],):
        raise OpRefusal(f"given {list(repeats.shape)} repeats for a dimension of {x.shape[dim]}")
    return x.gather(dim, _repeated(repeats, output_size).realize())


def _repeated(repeats: Tensor, output_size: int | None) -> Tensor:
    """The position that each result repeats: the number of positions whose repeats have ended before it."""
    if output_size is None or len(repeats.shape) != 1:
        raise OpRefusal("given no output_size: the shape depends on the values of repeats; pass output_size=")
    return _ended(cumsum(indices_of(repeats), 0), output_size)


def _ended(ends: Tensor, size: int) -> Tensor:
    """How many of `ends`, which do not fall, are at or before each of `size` positions: found by halving."""
    (count,), here = ends.shape, arange(ends.trace, size)
    found = full(ends.trace, (size,), 0, INT64)
    step = 1 << count.bit_length() >> 1
    while step:
        further = found + step
        end = ends.pick({0: apply("min", further - 1, count - 1)})
        passed = apply("and", further <= count, end <= here)
        found, step = where(passed, further, found), step >> 1
    return found


_MODES = ("sum", "mean", "amax")


@op("aten.embedding_bag.default", "aten.embedding_bag.padding_idx", is_learned=True, for_gradients=True)
def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Sums, means or maxima [B, D] of rows of `weight` [V, D] over bags of `indices` [N] that begin at `offsets` [B].

    Three further results, which gradients alone read, differ from device to device in PyTorch: here they are zeros.
    """
    if len(indices.shape) != 1 or len(offsets.shape) != 1:
        raise OpRefusal(f"given indices {list(indices.shape)} and offsets {list(offsets.shape)}, expected vectors")
    if mode not in range(len(_MODES)):
        raise OpRefusal(f"given mode={mode}, expected 0 (sum), 1 (mean) or 2 (max)")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    (count,), bags = indices.shape, offsets.shape[0] - bool(include_last_offset)
    starts = offsets.slice(0, 0, bags).within(count + 1)
    bag = (_ended(starts.realize(), count) - 1).realize()
    if include_last_offset:
        end = offsets.slice(0, bags, 1).within(count + 1)
        bag = where(arange(bag.trace, count) < end, bag, -1).realize()
    if padding_idx is not None:
        bag = where(apply("eq", indices_of(indices), padding_idx), -1, bag).realize()
    rows = embedding(weight, indices)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape((count, 1))
    empty = full(weight.trace, (bags, weight.shape[1]), 0, weight.dtype)
    result = reduced_rows(empty, 0, bag, rows, _MODES[mode], False)
    unread = (full(weight.trace, (size,), 0, INT64) for size in (count, bags, bags))
    return result, *unread
