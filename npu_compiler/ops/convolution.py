"""Convolution and pooling of images [N, C, H, W]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

from npu_compiler.ops.indexing import pad
from npu_compiler.ops.reduction import total
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Term, Work
from npu_compiler.tensor.reducing import reduce
from npu_compiler.tensor.symbolic import OpRefusal, Tensor


def flops(operands: Sequence[tuple[int, ...]], made: int) -> int | None:
    """A multiplication and an addition for each number of a filter, by the shape of `weight`, the second operand."""
    return 2 * made * prod(operands[1][1:]) if len(operands) > 1 else None


filtering = partial(
    op,
    work=Work.ANCHOR,
    images={"input": "image", "weight": "conv_weight"},
    is_learned=True,
    flops=flops,
)
image_filtering = partial(filtering, term=Term("convolution", ("input", "weight", "bias")))
line_pooling = partial(op, work=Work.ANCHOR)
pooling = partial(line_pooling, images={"self": "image"})


def _pair(value: Any, name: str) -> tuple[int, int]:
    """A size for height and width, given as one number, a list of one or a list of two."""
    values = [value] if isinstance(value, int) else list(value)
    if len(values) not in (1, 2) or any(type(v) is not int for v in values):
        raise OpRefusal(f"given {name}={value!r}, expected one or two whole numbers")
    return values[0], values[-1]


def _row(x: Tensor) -> Tensor:
    """A line as an image one row high."""
    return x.reshape((*x.shape[:-1], 1, x.shape[-1]))


@image_filtering("aten.conv2d.default")
def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Cross-correlation of [N, C, H, W] with weight [O, C / groups, KH, KW], plus bias [O]."""
    if len(input.shape) != 4 or len(weight.shape) != 4:
        raise OpRefusal(f"given {len(input.shape)} dimensions, expected 4: [N, C, H, W]")
    if not input.dtype.is_float:
        raise OpRefusal(f"given {input.dtype}, expected floating point")
    strides, pads, dilations = _pair(stride, "stride"), _pair(padding, "padding"), _pair(dilation, "dilation")
    if min(strides) < 1 or min(dilations) < 1 or min(pads) < 0:
        raise OpRefusal(f"given stride={strides}, padding={pads}, dilation={dilations}: out of range")
    batch, channels, *size = input.shape
    outputs, per_group, *kernel = weight.shape
    if groups < 1 or channels != per_group * groups or outputs % groups:
        raise OpRefusal(f"{channels} channels, weight {list(weight.shape)} and groups={groups} do not fit together")
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(size, pads, dilations, kernel, strides, strict=True)
    ]
    if min(out) < 1:
        raise OpRefusal(f"the kernel {kernel} does not fit into the image {size}")
    result = input.trace.anchor(
        "conv2d", (input, weight), (batch, outputs, *out), input.dtype, "image",
        stride=strides, padding=pads, dilation=dilations, groups=groups,
    )  # fmt: skip
    return result if bias is None else result + bias.reshape((-1, 1, 1))


@image_filtering("aten.conv2d.padding")
def conv2d_padding(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: str = "valid",
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """The convolution without padding, or with as much as keeps the size: where it is odd, one more behind."""
    if padding not in ("same", "valid"):
        raise OpRefusal(f"given padding='{padding}', expected 'same' or 'valid'")
    if padding == "valid":
        return conv2d(input, weight, bias, stride, (0, 0), dilation, groups)
    if _pair(stride, "stride") != (1, 1):
        raise OpRefusal(f"given stride={stride} with padding='same', expected 1")
    total = [d * (k - 1) for d, k in zip(_pair(dilation, "dilation"), weight.shape[2:], strict=True)]
    if any(t % 2 for t in total):
        input = pad(input, [0, total[1] % 2, 0, total[0] % 2])
    return conv2d(input, weight, bias, stride, [t // 2 for t in total], dilation, groups)


@filtering("aten.conv1d.default")
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """Cross-correlation of [N, C, L] with weight [O, C / groups, K], plus bias [O]: of images one row high."""
    if len(input.shape) != 3 or len(weight.shape) != 3:
        raise OpRefusal(f"given {len(input.shape)} dimensions, expected 3: [N, C, L]")
    result = conv2d(_row(input), _row(weight), bias, (1, *stride), (0, *padding), (1, *dilation), groups)
    return result.reshape((*result.shape[:2], result.shape[3]))


@filtering("aten.conv1d.padding")
def conv1d_padding(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: str = "valid",
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """The convolution of [N, C, L] with as much padding as `conv2d` has by that word."""
    if len(input.shape) != 3 or len(weight.shape) != 3:
        raise OpRefusal(f"given {len(input.shape)} dimensions, expected 3: [N, C, L]")
    result = conv2d_padding(_row(input), _row(weight), bias, (1, *stride), padding, (1, *dilation), groups)
    return result.reshape((*result.shape[:2], result.shape[3]))


@image_filtering("aten.convolution.default")
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolution in its general form, of which that of lines and images, not transposed, is supported."""
    if transposed or any(output_padding):
        raise OpRefusal("a transposed convolution is not supported")
    of_rank = conv1d if len(input.shape) == 3 else conv2d
    return of_rank(input, weight, bias, stride, padding, dilation, groups)


def _pool(x: Tensor, reduction: str, out: Sequence[int], **attrs: Any) -> Tensor:
    if len(x.shape) not in (3, 4):
        raise OpRefusal(f"given {len(x.shape)} dimensions, expected [N, C, H, W] or [C, H, W]")
    if not x.dtype.is_float:
        raise OpRefusal(f"given {x.dtype}, expected floating point")
    image = x if len(x.shape) == 4 else x.reshape((1, *x.shape))
    if min(out) < 1:
        raise OpRefusal(f"the window does not fit into the image {list(x.shape[-2:])}")
    shape = (*image.shape[:2], *out)
    result: Tensor = x.trace.anchor("pool2d", (image,), shape, x.dtype, "image", reduction=reduction, **attrs)
    return result if len(x.shape) == 4 else result.reshape(shape[1:])


def _windows(
    size: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> dict[str, Any]:
    """The geometry of a sliding window, with the size of the output under ``out``."""
    kernels = _pair(kernel, "kernel_size")
    strides = _pair(stride, "stride") if stride not in (None, [], ()) else kernels
    pads, dilations = _pair(padding, "padding"), _pair(dilation, "dilation")
    if (
        min(kernels) < 1
        or min(strides) < 1
        or min(dilations) < 1
        or any(2 * p > k for p, k in zip(pads, kernels, strict=True))
    ):
        raise OpRefusal(
            f"given kernel_size={kernels}, stride={strides}, padding={pads}, dilation={dilations}: out of range"
        )
    out = []
    for n, k, s, p, d in zip(size, kernels, strides, pads, dilations, strict=True):
        span = n + 2 * p - d * (k - 1) - 1
        count = (span + (s - 1 if ceil_mode else 0)) // s + 1
        if ceil_mode and (count - 1) * s >= n + p:  # PyTorch: the last window must begin inside of the image
            count -= 1
        out.append(count)
    return {"out": out, "kernel": kernels, "stride": strides, "padding": pads, "dilation": dilations}


@pooling("aten.max_pool2d.default")
def max_pool2d(
    self: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The maximum of each window; padding never wins."""
    return _pool(self, "max", **_windows(self.shape[-2:], kernel_size, stride, padding, dilation, ceil_mode))


@pooling("aten.avg_pool2d.default")
def avg_pool2d(
    self: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
) -> Tensor:
    """The mean of each window; padding counts as zeros unless `count_include_pad` is false."""
    windows = _windows(self.shape[-2:], kernel_size, stride, padding, 1, ceil_mode)
    if divisor_override is not None:
        return _pool(self, "sum", **windows) * (1 / float(divisor_override))
    return _pool(self, "mean" if count_include_pad else "mean_valid", **windows)


@pooling("aten.adaptive_avg_pool2d.default")
def adaptive_avg_pool2d(self: Tensor, output_size: Sequence[int]) -> Tensor:
    """Means over ``output_size`` windows; window `i` spans ``floor(i*n/out)`` to ``ceil((i+1)*n/out)``."""
    height, width = self.shape[-2:]
    out = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
    rows, columns = (n if o is None else o for n, o in zip((height, width), out, strict=True))
    if (rows, columns) == (1, 1):
        return reduce(self, total, (-2, -1), True, scale=1 / (height * width))[0]
    return _pool(self, "adaptive", (rows, columns))


def _pool_line(pool: Callable[..., Tensor], x: Tensor, *sizes: Any, beside: Sequence[int], **options: Any) -> Tensor:
    """A pool of images on a line; each of `sizes` gets the number that is neutral for its one row."""
    both = [(one, *([size] if isinstance(size, int) else size)) for size, one in zip(sizes, beside, strict=True)]
    result = pool(_row(x), *both, **options)
    return result.reshape((*result.shape[:-2], result.shape[-1]))


@line_pooling("aten.max_pool1d.default")
def max_pool1d(
    self: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """The maximum of each window of a line; padding never wins."""
    sizes = (kernel_size, stride or kernel_size, padding, dilation)
    return _pool_line(max_pool2d, self, *sizes, beside=(1, 1, 0, 1), ceil_mode=ceil_mode)


@line_pooling("aten.avg_pool1d.default")
def avg_pool1d(
    self: Tensor,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of each window of a line; padding counts as zeros unless `count_include_pad` is false."""
    sizes, options = (kernel_size, stride or kernel_size, padding), {"count_include_pad": count_include_pad}
    return _pool_line(avg_pool2d, self, *sizes, beside=(1, 1, 0), ceil_mode=ceil_mode, **options)


@line_pooling("aten.adaptive_avg_pool1d.default")
def adaptive_avg_pool1d(self: Tensor, output_size: Any) -> Tensor:
    """Means over ``output_size`` windows of a line, which span as those of `adaptive_avg_pool2d`."""
    return _pool_line(adaptive_avg_pool2d, self, output_size, beside=(1,))
