"""Convolution of lines [N, C, L], images [N, C, H, W] and volumes [N, C, D, H, W], or of one without the batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import gcd, prod
from typing import Any, NamedTuple

from npu_compiler.dtypes import FLOAT32
from npu_compiler.ops.padding import surrounded
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Term, Work
from npu_compiler.tensor.layout import filter_order
from npu_compiler.tensor.symbolic import OpRefusal, Tensor

_CHUNK = 8  # channels, in whole numbers of which images of a volume's planes are made


def flops(operands: Sequence[tuple[int, ...]], made: int) -> int | None:
    """A multiplication and an addition for each number of a filter, by the shape of `weight`, the second operand."""
    return 2 * made * prod(operands[1][1:]) if len(operands) > 1 else None


filtering = partial(op, work=Work.ANCHOR, is_learned=True, flops=flops)
"""A convolution; `image_ranks` says of how many dimensions its operands are where they come with a batch."""
IMAGES = {"input": "image", "weight": "conv_weight"}
_PARAMETERS = ("input", "weight", "bias")
image_filtering = partial(filtering, images=IMAGES, term=Term("convolution", _PARAMETERS))
line_filtering = partial(image_filtering, image_ranks=(3,))
volume_filtering = partial(image_filtering, image_ranks=(5,))


def sizes(value: Any, rank: int, name: str) -> tuple[int, ...]:
    """A number for each spatial dimension, given as one number, a list of one or a list of as many."""
    values = [value] if isinstance(value, int) else list(value)
    if len(values) not in (1, rank) or {*map(type, values)} != {int}:
        raise OpRefusal(f"given {name}={value!r}, expected one or {rank} whole numbers")
    return tuple(values) if len(values) == rank else (values[0],) * rank


class Sliding(NamedTuple):
    """How filters slide, a number for each spatial dimension.

    Attributes:
        stride, dilation: Elements from one window to the next, and from one tap to the next.
        before: Zeros ahead of the first element.
        out: Windows; where it is not given, as many as fit.
        after: Zeros behind the last element, where they are not as many as ahead.
    """

    stride: Sequence[int]
    before: Sequence[int]
    dilation: Sequence[int]
    out: Sequence[int] | None = None
    after: Sequence[int] | None = None


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, sliding: Sliding, groups: int, outside: int | None = None
) -> Tensor:
    """Cross-correlation.

    Args:
        x: [N, C, ...], with one to three spatial dimensions.
        weight: [O, C / groups, ...].
        bias: [O].
        sliding: How the filters slide.
        groups: Groups of channels.
        outside: Where operands are codes, whose sums are float32: the code that lies around the image.

    Raises:
        OpRefusal: Sizes are out of range, or do not fit together.
    """
    rank = len(x.shape) - 2
    stride, before, dilation, out, after = sliding
    if min(stride) < 1 or min(dilation) < 1 or min(before) < 0:
        raise OpRefusal(f"given stride={stride}, padding={before}, dilation={dilation}: out of range")
    batch, channels, *size = x.shape
    outputs, per_group, *kernel = weight.shape
    if groups < 1 or channels != per_group * groups or outputs % groups:
        raise OpRefusal(f"{channels} channels, weight {list(weight.shape)} and groups={groups} do not fit together")
    if out is None:
        out = [
            (n + p + q - d * (k - 1) - 1) // s + 1
            for n, p, q, d, k, s in zip(size, before, after or before, dilation, kernel, stride, strict=True)
        ]
    if min(out, default=0) < 1 or 0 in kernel:
        raise OpRefusal(f"the kernel {kernel} does not fit into the image {size}")
    shape = (batch, outputs, *out)
    weight = _by_taps(weight)
    if rank == 3:
        x, weight, stride, before, dilation, out = _as_planes(x, weight, stride, before, dilation, out)
    elif rank == 1:
        stride, before, dilation, out = (1, *stride), (0, *before), (1, *dilation), (1, *out)
    kind = x.dtype if outside is None else FLOAT32
    result = x.trace.anchor(
        "conv2d", (x, weight), shape, kind, "image", extents=(x.shape[0], outputs, *out), stride=tuple(stride),
        padding=tuple(before), dilation=tuple(dilation), groups=groups, outside=outside or 0,
    )  # fmt: skip
    return result if bias is None else result + bias.reshape((-1, *(1,) * rank))


def _by_taps(weight: Tensor) -> Tensor:
    """A weight that is computed lies as kernels want it, where that takes no more memory; one of a file does anyway."""
    weight = weight.realize()
    ref = weight.placed()
    computed = weight.trace.tensors[ref.tensor].source is not None
    if not computed or weight.shape[1] % _CHUNK or ref.view.strides[1] == 1:
        return weight
    return weight.trace.map(weight, order=(0, *filter_order(weight.shape)))


def _as_planes(x: Tensor, weight: Tensor, *geometry: Sequence[int]) -> tuple[Any, ...]:
    """A convolution of volumes as one of images: taps along the depth become channels of each plane.

    Where all taps lie along the depth, planes are lines, and these are the columns of an image.
    """
    (stride, before, dilation, out), kernel = geometry, weight.shape[2:]
    batch, channels, depth, height, width = x.shape
    flat = all((s, p, d) == (1, 0, 1) for s, p, d in zip(stride[1:], before[1:], dilation[1:], strict=True))
    if kernel[1:] == (1, 1) and flat and tuple(out[1:]) == (height, width):
        image = x.reshape((batch, channels, depth, height * width))
        columns = ((stride[0], 1), (before[0], 0), (dilation[0], 1), (out[0], height * width))
        return image, weight.reshape((*weight.shape[:3], 1)), *columns
    span = (out[0] - 1) * stride[0] + dilation[0] * (kernel[0] - 1) + 1
    padded = surrounded(x, 2, before[0], span - depth - before[0])
    spare = -channels % (_CHUNK // gcd(_CHUNK, kernel[0]))
    if kernel[0] > 1 and spare and weight.shape[1] == channels:
        padded, channels = surrounded(padded, 1, 0, spare), channels + spare
        filters = surrounded(weight, 1, 0, spare)
        weight = x.trace.map(filters, order=(0, *filter_order(filters.shape)))
    planes = padded.window(2, out[0], stride[0], kernel[0], dilation[0]).permute((0, 2, 1, 5, 3, 4))
    shape = (batch * out[0], channels * kernel[0], height, width)
    if kernel[0] > 1 or planes.ref is None or planes.ref.apply(("reshape", shape)) is None:
        planes = x.trace.map(planes, order=(0, 1, 4, 5, 2, 3))
    filters = weight.reshape((weight.shape[0], weight.shape[1] * kernel[0], *kernel[1:]))
    return planes.reshape(shape), filters, *(numbers[1:] for numbers in (stride, before, dilation, out))


def with_batch(x: Tensor, weight: Tensor) -> Tensor:
    """What a weight is for, with its batch, which may be left out where it is one.

    Raises:
        OpRefusal: Their dimensions do not go together, or it is no floating point.
    """
    rank = len(weight.shape) - 2
    if rank not in (1, 2, 3):
        raise OpRefusal(f"given a weight of {rank + 2} dimensions, expected 3 to 5")
    if len(x.shape) not in (rank + 1, rank + 2):
        names = "C" + "".join(f", {name}" for name in "DHW"[3 - rank :] if rank > 1) + (", L" if rank == 1 else "")
        raise OpRefusal(f"given {len(x.shape)} dimensions, expected {rank + 2}: [N, {names}], or [{names}]")
    if not x.dtype.is_float:
        raise OpRefusal(f"given {x.dtype}, expected floating point")
    return x if len(x.shape) == rank + 2 else x.reshape((1, *x.shape))


def sliding_of(kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> Sliding:
    """How filters of a size slide, as schemas say it; `padding` may be a word.

    Raises:
        OpRefusal: A number is not one for each spatial dimension, or the word is unknown or does not fit the others.
    """
    rank = len(kernel)
    strides, dilations = sizes(stride, rank, "stride"), sizes(dilation, rank, "dilation")
    if not isinstance(padding, str):
        before = after = sizes(padding, rank, "padding")
    elif padding == "valid":
        before = after = (0,) * rank
    elif padding != "same":
        raise OpRefusal(f"given padding='{padding}', expected 'same' or 'valid'")
    elif max(strides) > 1:
        raise OpRefusal(f"given stride={stride} with padding='same', expected 1")
    else:
        around = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        before, after = tuple(n // 2 for n in around), tuple(n - n // 2 for n in around)
    return Sliding(strides, before, dilations, after=after)


@line_filtering("aten.conv1d.default", "aten.conv1d.padding")
@image_filtering("aten.conv2d.default", "aten.conv2d.padding")
@volume_filtering("aten.conv3d.default", "aten.conv3d.padding")
def conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Cross-correlation of [N, C, ...] with weight [O, C / groups, ...], plus bias [O]; padding: numbers, or a word."""
    batched = with_batch(input, weight)
    result = convolve(batched, weight, bias, sliding_of(weight.shape[2:], stride, padding, dilation), groups)
    return result if batched is input else result.reshape(result.shape[1:])
