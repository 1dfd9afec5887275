"""Images and weights as convolutions on tensor cores read them: channels-last, channels filled up to whole chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import CHUNK
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.operands import MAX_ELEMENTS
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.windows import image_values
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch
from npu_compiler.tensor.layout import Layout, filter_order
from npu_compiler.tensor.symbolic import OpRefusal

__all__ = [
    "PACK_CHANNELS",
    "SIZE_MACROS",
    "TAP_MACROS",
    "along_axes",
    "filter_layout",
    "image_macros",
    "is_packed_image",
    "is_packed_weight",
    "pack_image",
    "packed_weight",
]

_FEW_CHANNELS = 4  # of which two neighbouring pixels, or taps, make a chunk
_PACK_THREADS = 256

PACK_CHANNELS = KernelTemplate(
    "pack_channels",
    params="int image_stride, channel_stride, y_stride, x_stride, pixels",
    macros="a_t PIECE PIECES CHANNELS OF_PIXEL DISTANCE FIRST PACKED_WIDTH WIDTH HEIGHT",
    inputs="image",
    outputs="out",
    threads=_PACK_THREADS,
)


TAP_MACROS = "TAPS_Y TAPS_X STEP_Y STEP_X PAD_Y PAD_X DILATION_Y DILATION_X"
"""What kernels are told of sliding windows, by `along_axes`."""
SIZE_MACROS = "HEIGHT WIDTH OUT_HEIGHT OUT_WIDTH"
"""What `image_macros` defines beside strides."""


def along_axes(**pairs: tuple[int, int]) -> dict[str, int]:
    """Macros for both axes of pairs (vertical, horizontal): of ``STEP``, ``STEP_Y`` and ``STEP_X``."""
    return {f"{name}_{axis}": value for name, pair in pairs.items() for value, axis in zip(pair, "YX", strict=True)}


def image_macros(image: Operand, shape: tuple[int, ...]) -> dict[str, int]:
    """Macros of the names that `image_values` has for parameters, in capitals."""
    return {name.upper(): value for name, value in image_values(image, shape).items()}


def packed_weight(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape [O, I, KH, KW] of a weight whose taps are filled up with zeros to whole chunks."""
    outputs, channels, height, width = shape
    if channels <= _FEW_CHANNELS:
        return outputs, _FEW_CHANNELS, height, ceil_div(width, 2) * 2
    return outputs, ceil_div(channels, CHUNK) * CHUNK, height, width


def filter_layout(shape: tuple[int, ...]) -> Layout:
    """How a weight [O, I, ...] lies: tap by tap, filled up to whole chunks; of one channel, with its outputs innermost.

    Each channel with filters of its own has them side by side with those of its neighbours.
    """
    order, rank = filter_order(shape), len(shape)
    if shape[1] == 1 and rank < 5:
        return Layout(shape, shape, (*order, 0))
    if rank == 5 and order[-1] == 2 and shape[2] > 1:
        return Layout(shape, shape, (0, *order))  # taps along the depth are channels, too
    if rank == 5:
        plane = shape[3:] if order[-1] == 2 else shape[2:4]
        outputs, channels, height, width = packed_weight((*shape[:2], *plane))
        taps = (1, height, width) if order[-1] == 2 else (height, width, 1)
        return Layout(shape, (outputs, channels, *taps), (0, *order))
    outputs, channels, *filled = packed_weight((*shape[:2], *(1,) * (4 - rank), *shape[2:]))
    return Layout(shape, (outputs, channels, *filled[4 - rank :]), (0, *order))


def is_packed_weight(weight: Operand) -> bool:
    """Whether a weight lies as [O, KH, KW, I], with its taps filled up."""
    _, channels, height, width = packed_weight(weight.shape)
    expected = (channels * height * width, 1, width * channels, channels)
    pairs = zip(weight.shape, weight.strides, expected, strict=True)
    return weight.offset == 0 and all(n == 1 or stride == wanted for n, stride, wanted in pairs)


def is_packed_image(image: Operand, channels: int) -> bool:
    """Whether pixels follow each other without gaps between rows or images, each from a 16-byte border on."""
    image_stride, channel_stride, y_stride, x_stride = image.strides
    batch, total, height, width = image.shape
    followed = (width == 1 or x_stride == total) and (height == 1 or y_stride == width * total)
    followed &= batch == 1 or image_stride == height * width * total
    return followed and channel_stride == 1 and channels % CHUNK == 0 and image.offset % CHUNK == 0


def pack_image(
    image: Operand, geometry: Mapping[str, int], lowering: Lowering
) -> tuple[KernelCall, Argument, dict[str, int]]:
    """A launch that brings an image to channels-last with filled-up channels, its result, and the geometry of that.

    Args:
        image: [N, C, H, W].
        geometry: What the convolution knows of the image and of the taps, the channels filled up.
        lowering: Where the trace's tensors are.

    Raises:
        OpRefusal: The result is too large.
    """
    packing = _packing(geometry)
    width, channels = packing.width, packing.channels
    batch, given, height, given_width = image.shape
    pixels = batch * height * width
    if pixels * channels >= MAX_ELEMENTS:
        name, elements = image.tensor.name, pixels * channels
        raise OpRefusal(f"'{name}' takes {elements} elements with {channels} channels, at most 2^31")
    piece = min(channels, CHUNK)
    result = Argument(lowering.scratch(pixels * channels * image.dtype.size), writes=True)
    values = {**PACK_CHANNELS.values_among(image_values(image, image.shape)), "pixels": pixels}
    macros = {
        "a_t": CUDA.storage[image.dtype.name],
        "PIECE": piece,
        "PIECES": channels // piece,
        "CHANNELS": given,
        "OF_PIXEL": geometry["PIXEL_STRIDE"],
        "DISTANCE": packing.distance,
        "FIRST": packing.first,
        "PACKED_WIDTH": width,
        "WIDTH": given_width,
        "HEIGHT": height,
    }
    launch = Launch(
        PACK_CHANNELS,
        grid=(ceil_div(pixels * (channels // piece), _PACK_THREADS), 1, 1),
        values=values,
        macros=macros,
        inputs={"image": image.argument},
        outputs={"out": result},
    )
    nbytes = (pixels * channels + prod(image.shape)) * image.dtype.size
    call = KERNELS.launch_alone(launch, f"channels of {image.tensor.name}", nbytes, lowering)
    return call, Argument(result.buffer), packing.geometry


@dataclass(frozen=True)
class _Packing:
    """How an image is packed.

    Attributes:
        geometry: That of the packed image.
        first: Pixels of zeros, or with zeros, that come before each of its lines.
        width, channels: Of the lines that are stored, in pixels.
        distance: Where a stored pixel is a pair that overlaps the next one: how far apart its two are.
    """

    geometry: dict[str, int]
    first: int
    width: int
    channels: int
    distance: int = 0


def _packing(geometry: Mapping[str, int]) -> _Packing:
    """How an image of some geometry is packed.

    Images of few channels are walked two pixels at a time: two pixels become one of twice the channels, and so do two
    taps. Where windows move on by an even number of pixels, every second pixel begins a pair; a window that begins at
    an odd one begins at an even one when a pixel of zeros comes first. Otherwise every pixel begins a pair, with the
    one that the next tap reads, and what is read two taps on is the next pair of a window.
    """
    channels, width, pad = geometry["CHANNELS"], geometry["WIDTH"], geometry["PAD_X"]
    step, dilation = geometry["STEP_X"], geometry["DILATION_X"]
    if channels != _FEW_CHANNELS:
        return _Packing(dict(geometry), 0, width, geometry["PIXEL_STRIDE"])
    paired = {"CHANNELS": 2 * channels, "PIXEL_STRIDE": 2 * channels, "TAPS_X": geometry["TAPS_X"] // 2}
    if step % 2 == 0 and dilation == 1:
        first = pad % 2
        pairs = ceil_div(width + first, 2)
        paired |= {"STEP_X": step // 2, "PAD_X": (pad - first) // 2, "WIDTH": pairs}
        return _Packing({**geometry, **paired}, first, 2 * pairs, channels)
    first = min(pad, dilation)  # pairs that begin with padding and end inside of the image
    paired |= {"DILATION_X": 2 * dilation, "PAD_X": pad - first, "WIDTH": width + first}
    return _Packing({**geometry, **paired}, first, width + first, 2 * channels, dilation)
