"""Windows of images as columns of matrices, and the other way around."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from npu_compiler.dtypes import FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.ops.padding import pad
from npu_compiler.ops.registry import op
from npu_compiler.ops.slicing import copied
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, full, where


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else (*value, *value)[:2]
    return first, second


def _window_counts(shape: Sequence[int], kernel: Any, dilation: Any, padding: Any, stride: Any) -> tuple[int, int]:
    """How many windows there are along height and width."""
    counts = []
    for size, taps, apart, around, step in zip(
        shape, *(_pair(value) for value in (kernel, dilation, padding, stride)), strict=True
    ):
        if min(taps, apart, step) < 1 or around < 0:
            raise OpRefusal(f"given taps={taps}, dilation={apart}, padding={around}, stride={step}")
        counts.append((size + 2 * around - apart * (taps - 1) - 1) // step + 1)
    if min(counts) < 1:
        raise OpRefusal(f"windows of {list(_pair(kernel))} do not fit into {list(shape)}")
    return counts[0], counts[1]


@op("aten.im2col.default")
def im2col(
    self: Tensor, kernel_size: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """The windows of images [N, C, H, W] as columns [N, C * taps, windows]; zeros lie around the images."""
    if len(self.shape) == 3:
        return im2col(self.reshape((1, *self.shape)), kernel_size, dilation, padding, stride).reshape(
            _column_shape(self.shape[0], self.shape[1:], kernel_size, dilation, padding, stride)
        )
    counts = _window_counts(self.shape[2:], kernel_size, dilation, padding, stride)
    windows, inside = self.realize(), None
    for axis, (taps, apart, around, step) in enumerate(
        zip(*map(_pair, (kernel_size, dilation, padding, stride)), strict=True)
    ):
        size = self.shape[2 + axis]
        windows = windows.slice(2 + axis, -around, size + 2 * around).window(2 + axis, counts[axis], step, taps, apart)
        if around:
            place = (arange(self.trace, size + 2 * around) - around).window(0, counts[axis], step, taps, apart)
            held = apply("and", place >= 0, place < size)
            held = held.reshape((counts[axis], 1, taps, 1) if axis == 0 else (counts[axis], 1, taps))
            inside = held if inside is None else apply("and", inside, held)
    if inside is not None:
        windows = where(inside, windows, full(self.trace, (), 0, self.dtype))
    columns = windows.permute((0, 1, 4, 5, 2, 3))
    shape = _column_shape(self.shape[1], self.shape[2:], kernel_size, dilation, padding, stride)
    return copied(columns).realize().reshape((self.shape[0], *shape))


def _column_shape(channels: int, shape: Sequence[int], kernel: Any, *others: Any) -> tuple[int, int]:
    return channels * prod(_pair(kernel)), prod(_window_counts(shape, kernel, *others))


_MOST_TAPS = 25  # that one expression adds up


@op("aten.col2im.default")
def col2im(
    self: Tensor, output_size: Sequence[int], kernel_size: Sequence[int], dilation: Sequence[int],
    padding: Sequence[int], stride: Sequence[int],
) -> Tensor:  # fmt: skip
    """Images [N, C, H, W] from the columns of their windows [N, C * taps, windows]: what overlaps is added."""
    if len(self.shape) == 2:
        batched = self.reshape((1, *self.shape))
        single = col2im(batched, output_size, kernel_size, dilation, padding, stride)
        return single.reshape(single.shape[1:])
    counts, (height, width) = _window_counts(output_size, kernel_size, dilation, padding, stride), output_size
    taps, steps = _pair(kernel_size), _pair(stride)
    batch, channels = self.shape[0], self.shape[1] // prod(taps)
    if self.shape[1:] != (channels * prod(taps), prod(counts)):
        raise OpRefusal(f"given columns {list(self.shape)}, expected {prod(counts)} windows of {prod(taps)} taps")
    columns = self.realize().reshape((batch, channels, *taps, *counts))
    if taps == steps and _pair(dilation) == (1, 1) and _pair(padding) == (0, 0):
        whole = columns.permute((0, 1, 4, 2, 5, 3)).reshape(
            (batch, channels, *map(prod, zip(counts, taps, strict=True)))
        )
        return _padded_to(whole, height, width)
    kind = FLOAT32 if self.dtype.is_float else self.dtype
    image: Tensor | None = None
    for number, tap in enumerate(product(*map(range, taps))):
        part = columns.slice(2, tap[0], 1).slice(3, tap[1], 1).reshape((batch, channels, *counts)).cast(kind)
        spread = _spread(part, tap, output_size, _pair(dilation), _pair(padding), steps)
        image = spread if image is None else image + spread
        image = image.realize() if number % _MOST_TAPS == _MOST_TAPS - 1 else image
    assert image is not None
    sizes = (image.shape[2] * steps[0], image.shape[4] * steps[1])
    whole = image.cast(self.dtype).realize().reshape((batch, channels, *sizes))
    return whole.slice(2, 0, height).slice(3, 0, width)


def _padded_to(image: Tensor, height: int, width: int) -> Tensor:
    rows, columns = height - image.shape[2], width - image.shape[3]
    return pad(image, (0, columns, 0, rows)) if rows or columns else image


def _spread(
    part: Tensor, tap: Sequence[int], sizes: Sequence[int], apart: Sequence[int], around: Sequence[int],
    steps: Sequence[int],
) -> Tensor:  # fmt: skip
    """What a tap of all windows [N, C, windows, windows] adds to an image [N, C, H / step, step, W / step, step]."""
    batch, channels, *counts = part.shape
    source, held = part, []
    for axis in (0, 1):
        step = steps[axis]
        lead, phase = divmod(tap[axis] * apart[axis] - around[axis], step)  # window i is at i * step + this
        runs = ceil_div(sizes[axis], step)
        source = source.slice(2 + axis, -lead, runs)  # read only where there is a window
        window = arange(part.trace, runs).reshape((runs, 1)) - lead
        inside = apply("and", window >= 0, window < counts[axis])
        held.append(apply("and", inside, apply("eq", arange(part.trace, step), phase)) if step > 1 else inside)
    rows, columns = held
    source = source.reshape((batch, channels, rows.shape[0], 1, columns.shape[0], 1))
    inside = apply("and", rows.reshape((*rows.shape, 1, 1)), columns)
    return where(inside, source, full(part.trace, (), 0, part.dtype))
