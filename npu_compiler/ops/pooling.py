"""Pooling of lines, images and volumes, with a batch or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from npu_compiler.dtypes import FLOAT32, INT8, INT32, INT64, UINT8, DType
from npu_compiler.ops.convolution import sizes
from npu_compiler.ops.padding import along, divided
from npu_compiler.ops.reduction import first_greatest, greatest, pixel_parts, total
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.expr import Call, Const
from npu_compiler.tensor.reducing import State, reduce
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, full, where

_pooling = partial(op, work=Work.ANCHOR, images={"self": "image"})
_MANY_PIXELS = 1024  # whose sum has a step of its own for parts of them
RANKS = {1: (3,), 2: (4,), 3: (5,)}


def _batched(x: Tensor, rank: int) -> Tensor:
    """The operand with its batch, which may be left out where it is one."""
    if len(x.shape) not in (rank + 1, rank + 2):
        raise OpRefusal(f"given {len(x.shape)} dimensions, expected {rank + 2}, or {rank + 1} without a batch")
    if not x.dtype.is_float:
        raise OpRefusal(f"given {x.dtype}, expected floating point")
    return x if len(x.shape) == rank + 2 else x.reshape((1, *x.shape))


def _unbatched(result: Tensor, x: Tensor) -> Tensor:
    """The result as its operand was: with or without a batch."""
    return result if len(result.shape) == len(x.shape) else result.reshape(result.shape[1:])


class _Windows:
    """Sliding windows as a schema has them, with their number along each dimension."""

    def __init__(
        self, size: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
    ) -> None:
        rank, self.size = len(size), tuple(size)
        self.kernel = sizes(kernel, rank, "kernel_size")
        self.stride = sizes(stride, rank, "stride") if stride not in (None, [], ()) else self.kernel
        self.padding, self.dilation = sizes(padding, rank, "padding"), sizes(dilation, rank, "dilation")
        far = any(2 * p > k for p, k in zip(self.padding, self.kernel, strict=True))
        if min(*self.kernel, *self.stride, *self.dilation, *(p + 1 for p in self.padding)) < 1 or far:
            given = f"kernel_size={self.kernel}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}"
            raise OpRefusal(f"given {given}: out of range")
        self.out = tuple(self._count(axis, ceil_mode) for axis in range(rank))
        if min(self.out) < 1:
            raise OpRefusal(f"the window does not fit into the image {list(size)}")

    def _count(self, axis: int, ceil_mode: bool) -> int:
        n, k, s, p, d = (each[axis] for each in (self.size, self.kernel, self.stride, self.padding, self.dilation))
        span = n + 2 * p - d * (k - 1) - 1
        count = (span + (s - 1 if ceil_mode else 0)) // s + 1
        # PyTorch: the last window must begin inside of the image
        return count - 1 if ceil_mode and (count - 1) * s >= n + p else count

    def is_plain(self, *axes: int) -> bool:
        """Whether windows are single elements along all of these dimensions."""
        return all((self.kernel[a], self.stride[a], self.padding[a]) == (1, 1, 0) for a in axes)

    def along(self, *axes: int) -> dict[str, Any]:
        """Their geometry along two dimensions; -1 stands for one with windows of one element."""
        pairs = {"kernel": self.kernel, "stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        neutral = {"kernel": 1, "stride": 1, "padding": 0, "dilation": 1}
        return {name: tuple(neutral[name] if a < 0 else each[a] for a in axes) for name, each in pairs.items()}


def _pool(
    x: Tensor, reduction: str, out: Sequence[int], windows: _Windows | None, dtype: DType | None = None
) -> Tensor:
    """Pools [N, C, ...] of any rank: volumes plane by plane, and then along the depth.

    Args:
        x: What to pool.
        reduction: One of `problems.pooling`.
        out: Windows along each dimension.
        windows: How they slide; none for adaptive ones, which their number says.
        dtype: Of the result; that of `x` where it is not given.
    """
    rank = len(x.shape) - 2

    def anchor(image: Tensor, shape: tuple[int, ...], extents: tuple[int, ...], *axes: int) -> Tensor:
        geometry = {} if windows is None else windows.along(*axes)
        return image.trace.anchor(
            "pool2d", (image,), shape, dtype or image.dtype, "image", reduction=reduction, extents=extents, **geometry
        )

    batch, channels = x.shape[:2]
    if rank < 3:
        ones = (1,) * (2 - rank)
        axes = (-1, 0) if rank == 1 else (0, 1)
        return anchor(x, (batch, channels, *out), (batch, channels, *ones, *out), *axes)
    depth, height, width = x.shape[2:]
    if tuple(out[1:]) == (height, width) and (windows is None or windows.is_plain(1, 2)):
        columns = x.reshape((batch, channels, depth, height * width))
        return anchor(columns, (batch, channels, *out), (batch, channels, out[0], height * width), 0, -1)
    planes = x.permute((0, 2, 1, 3, 4)).reshape((batch * depth, channels, height, width))
    across = anchor(planes, (*planes.shape[:2], *out[1:]), (*planes.shape[:2], *out[1:]), 1, 2)
    stacked = across.reshape((batch, depth, channels, *out[1:])).permute((0, 2, 1, 3, 4))
    columns = stacked.reshape((batch, channels, depth, out[1] * out[2]))
    return anchor(columns, (batch, channels, *out), (batch, channels, out[0], out[1] * out[2]), 0, -1)


def _max_pool(rank: int, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Tensor:
    image = _batched(x, rank)
    windows = _Windows(image.shape[2:], kernel, stride, padding, dilation, ceil_mode)
    return _unbatched(_pool(image, "max", windows.out, windows), x)


@dataclass(frozen=True)
class _Axis:
    """Windows along one dimension: where each begins, as int32 [windows], how many taps it has, and where it ends."""

    starts: Tensor
    taps: int
    dilation: int
    end: Tensor | int

    def place(self, tap: Tensor) -> Tensor:
        return self.starts + tap * self.dilation


def _sliding(windows: _Windows, x: Tensor) -> list[_Axis]:
    vector = [along(x, len(x.shape) - 1, count) for count in windows.out]
    starts = [v * s - p for v, s, p in zip(vector, windows.stride, windows.padding, strict=True)]
    geometry = zip(starts, windows.kernel, windows.dilation, windows.size, strict=True)
    return [_Axis(start, taps, dilation, size) for start, taps, dilation, size in geometry]


def _uneven(size: Sequence[int], out: Sequence[int], x: Tensor) -> list[_Axis]:
    """Adaptive windows: number `i` spans ``floor(i * n / out)`` to ``ceil((i + 1) * n / out)``."""
    axes = []
    for n, count in zip(size, out, strict=True):
        number = along(x, len(x.shape) - 1, count)
        whole, rest = divmod(n, count)
        taps = whole + (0 if not rest else 1 if count % rest == 0 else 2)  # of the longest
        axes.append(_Axis(divided(number * n, count), taps, 1, divided((number + 1) * n + (count - 1), count)))
    return axes


def _places(x: Tensor, axes: Sequence[_Axis]) -> Tensor:
    """Where in the image [N, C, ...] the greatest element of each window is, in row-major order: [N, C, ...], int64."""
    rank, places, inside = len(axes), dict[int, Tensor](), None
    for number, axis in enumerate(axes):
        behind = (1,) * (rank - 1 - number)
        tap = along(x, len(x.shape) - 1, axis.taps).reshape((axis.taps, *behind))
        start = axis.starts.reshape((-1, *(1,) * (2 * rank - 1 - number)))
        end = axis.end if isinstance(axis.end, int) else axis.end.reshape(start.shape)
        place, last = start + tap * axis.dilation, x.shape[2 + number] - 1
        valid = apply("and", place >= 0, place < end)
        inside = valid if inside is None else apply("and", inside, valid)
        places[2 + number] = apply("min", apply("max", place, 0), last)
    assert inside is not None
    elements = x.reshape((*x.shape, *(1,) * rank)).at(places)
    values = where(inside, elements, full(x.trace, (), float("-inf"), x.dtype))
    tap = reduce(values, first_greatest, tuple(range(2 + rank, 2 + 2 * rank)), False)[1].cast(INT32)
    result: Tensor | None = None
    for number, axis in enumerate(axes):
        later = prod(other.taps for other in axes[number + 1 :])
        own = divided(tap, later)
        tap = tap - own * later
        place = axis.starts.reshape((-1, *(1,) * (rank - 1 - number))) + own * axis.dilation
        result = place if result is None else result * x.shape[2 + number] + place
    assert result is not None
    return result.cast(INT64)


def _define_max(rank: int) -> Callable[..., Tensor]:
    def compute(
        self: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Tensor:
        """The maximum of each window; padding never wins."""
        return _max_pool(rank, self, kernel_size, stride, padding, dilation, ceil_mode)

    def with_indices(
        self: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> State:
        """The maximum of each window, and where in its image it is; the first of several."""
        image = _batched(self, rank)
        windows = _Windows(image.shape[2:], kernel_size, stride, padding, dilation, ceil_mode)
        values = _pool(image, "max", windows.out, windows)
        return _unbatched(values, self), _unbatched(_places(image, _sliding(windows, image)), self)

    _pooling(f"aten.max_pool{rank}d.default", image_ranks=RANKS[rank])(compute)
    _pooling(f"aten.max_pool{rank}d_with_indices.default", image_ranks=RANKS[rank])(with_indices)
    return compute


@op("rewritten.max_pool_codes.default", work=Work.ANCHOR, images={"input": "image"}, image_ranks=RANKS[2])
def max_pool_codes(
    input: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The greatest of the codes of each window, as `input` has them: [N, C, H, W] of int8 or uint8."""
    if input.dtype not in (INT8, UINT8) or len(input.shape) != 4:
        raise OpRefusal(f"given {input.dtype}{list(input.shape)}, expected four dimensions of int8 or uint8")
    windows = _Windows(input.shape[2:], kernel_size, stride, padding, dilation, ceil_mode)
    greatest_code = _pool(input, "max", windows.out, windows, FLOAT32)
    return greatest_code.with_expr(Call("code", (greatest_code.expr, Const(0, INT32)), input.dtype), input.dtype)


def _mean_pool(
    rank: int,
    x: Tensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: Any,
) -> Tensor:
    image = _batched(x, rank)
    windows = _Windows(image.shape[2:], kernel, stride, padding, 1, ceil_mode)
    if divisor_override is None:
        return _unbatched(_pool(image, "mean" if count_include_pad else "mean_valid", windows.out, windows), x)
    if not divisor_override:
        raise OpRefusal("given divisor_override=0, expected another number")
    # sums of a window's planes are means of them while they are stored, which do not overflow
    scale = prod(windows.kernel) / float(divisor_override)
    if rank < 3:
        return _unbatched(_pool(image, "sum", windows.out, windows) * (1 / float(divisor_override)), x)
    if any(windows.padding) or ceil_mode:
        raise OpRefusal(f"given divisor_override={divisor_override} with padding or ceil_mode, expected neither")
    return _unbatched(_pool(image, "mean", windows.out, windows) * scale, x)


def _define_mean(rank: int) -> None:
    def compute(
        self: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: Any = None,
    ) -> Tensor:
        """The mean of each window; padding counts as zeros unless `count_include_pad` is false."""
        return _mean_pool(
            rank, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        )  # fmt: skip

    _pooling(f"aten.avg_pool{rank}d.default", image_ranks=RANKS[rank])(compute)


def _targets(output_size: Any, size: Sequence[int]) -> tuple[int, ...]:
    given = [output_size] * len(size) if output_size is None or isinstance(output_size, int) else list(output_size)
    given = given * len(size) if len(given) == 1 else given
    if len(given) != len(size) or any(o is not None and (type(o) is not int or o < 1) for o in given):
        raise OpRefusal(f"given output_size={output_size}, expected {len(size)} numbers from 1 on")
    return tuple(n if o is None else o for n, o in zip(size, given, strict=True))


def _adaptive(rank: int, x: Tensor, output_size: Any, reduction: str) -> Tensor:
    image = _batched(x, rank)
    size = image.shape[2:]
    out = _targets(output_size, size)
    if min(size) < 1:
        raise OpRefusal(f"given {list(size)}, expected elements")
    if prod(out) == 1:
        dims, count = tuple(range(-rank, 0)), prod(size)
        is_max = reduction == "adaptive_max"
        kind, scale = (greatest, None) if is_max else (total, 1 / count)
        if count >= _MANY_PIXELS and not is_max:
            parts = pixel_parts(image)
            (sums,) = reduce(parts, total, (-1,), False, FLOAT32, scale)
            result = reduce(sums, total, (1,), False)[0].cast(x.dtype)
            return result.reshape((*x.shape[:-rank], *(1,) * rank))
        return reduce(x, kind, dims, True, scale=scale)[0]
    return _unbatched(_pool(image, reduction, out, None), x)


def _define_adaptive(rank: int) -> None:
    def mean(self: Tensor, output_size: Any) -> Tensor:
        """Means over ``output_size`` windows; window `i` spans ``floor(i*n/out)`` to ``ceil((i+1)*n/out)``."""
        return _adaptive(rank, self, output_size, "adaptive")

    def maximum(self: Tensor, output_size: Any) -> State:
        """The maximum of each of ``output_size`` windows, and where in its image it is; they span as those of means."""
        image = _batched(self, rank)
        size = image.shape[2:]
        places = _places(image, _uneven(size, _targets(output_size, size), image))
        return _adaptive(rank, self, output_size, "adaptive_max"), _unbatched(places, self)

    names = [f"aten.adaptive_avg_pool{rank}d.default"]
    names += [f"aten._adaptive_avg_pool{rank}d.default"] if rank > 1 else []
    _pooling(*names, image_ranks=RANKS[rank])(mean)
    _pooling(f"aten.adaptive_max_pool{rank}d.default", image_ranks=RANKS[rank])(maximum)


_MAXIMA = {rank: _define_max(rank) for rank in RANKS}
max_pool2d = _MAXIMA[2]
for _rank in RANKS:
    _define_mean(_rank)
    _define_adaptive(_rank)


def _unpool(x: Tensor, indices: Tensor, output_size: Sequence[int], rank: int) -> Tensor:
    """Each element where its index says, in an image of zeros; the last of several."""
    if indices.shape != x.shape or indices.dtype.is_float or len(output_size) != rank:
        raise OpRefusal(f"given indices {indices.dtype}{list(indices.shape)} and output_size={list(output_size)}")
    planes, plane = prod(x.shape[:-rank]), prod(output_size)
    count = prod(x.shape[-rank:])
    if not planes * plane * count:
        raise OpRefusal("given no elements")
    places = indices.reshape((planes, count)).within(plane, otherwise=-1)
    zeros = full(x.trace, (planes, plane), 0, x.dtype).realize()
    result = x.trace.scatter(zeros, {1: places}, x.reshape((planes, count)))
    return result.reshape((*x.shape[:-rank], *output_size))


@op("aten.max_unpool2d.default")
def max_unpool2d(self: Tensor, indices: Tensor, output_size: Sequence[int]) -> Tensor:
    """The inverse of a pooling with indices: [..., H, W] of zeros, but for each maximum at its place."""
    return _unpool(self, indices, output_size, 2)


@op("aten.max_unpool3d.default")
def max_unpool3d(
    self: Tensor, indices: Tensor, output_size: Sequence[int], stride: Any = (), padding: Any = ()
) -> Tensor:
    """The inverse of a pooling with indices: [..., D, H, W] of zeros, but for each maximum at its place."""
    return _unpool(self, indices, output_size, 3)
