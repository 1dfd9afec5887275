"""Lowers convolutions of few channels that move on by two pixels: their windows are multiplied where they lie."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.devices import offers
from cuda_compiler.images.directions import DirectedGroup
from cuda_compiler.images.image_packing import image_macros, is_packed_weight, packed_weight
from cuda_compiler.images.window_tiles import (
    GROUP_THREADS,
    RESULT_BYTES,
    Tiles,
    fits_window_tiles,
    tiles_of,
    window_launch,
    window_template,
)
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.problems.convolution import Convolution

__all__ = ["CONV2D_WINDOW", "PIXEL_MACROS", "Window", "fits_windows", "is_of_few_channels", "lower_windows"]
__all__ += ["pixel_macros", "window_under"]

_MAX_CHANNELS = 4  # two pixels of so many make 16 bytes
_MAX_STEPS = 16  # of 16 products: their weights stay in registers
_MAX_WORDS = 24  # of a tile's pixels that a thread has on their way

PIXEL_MACROS = (
    "CHANNELS CONTIGUOUS IMAGE_STRIDE CHANNEL_STRIDE Y_STRIDE X_STRIDE WEIGHT_TAPS_X STEP_Y BLOCKS BEFORE PAIRS LINE "
    "LINES WINDOW_BYTES"
)
"""What kernels that build on ``window_pixels.cuh`` are told, as `pixel_macros` gives it."""

CONV2D_WINDOW = window_template(
    "conv2d_window",
    PIXEL_MACROS,
    threads=GROUP_THREADS,
    shared_bytes=lambda macros: macros["WINDOW_BYTES"] + RESULT_BYTES,
    files="window_pixels.cuh",
)


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="windows"):
    """How many blocks share a multiprocessor."""

    blocks: int


@dataclass(frozen=True)
class Window:
    """A window and what a tile of results reads, in pairs of pixels.

    Attributes:
        before: Taps of zeros that let every window begin at an even pixel.
        pairs: Pairs in a line of the window.
        chunks: Pairs in the whole window.
        line, lines: Pairs in a line of what a tile reads, and its lines.
    """

    before: int
    pairs: int
    chunks: int
    line: int
    lines: int

    @property
    def nbytes(self) -> int:
        """Shared memory for the pixels of a tile."""
        return ceil_div(self.line * self.lines * 16, 128) * 128

    def fits(self, conv: Convolution) -> bool:
        """Whether registers hold the weights and, on their way, the pixels."""
        words = ceil_div(self.line * self.lines, GROUP_THREADS) * conv.channels
        return 2 <= self.chunks <= 2 * _MAX_STEPS and words <= _MAX_WORDS


def is_of_few_channels(conv: Convolution, device: DeviceModel) -> bool:
    """Whether the windows of a convolution are such that two pixels make a chunk, on a device that multiplies them."""
    by_twos = (conv.windows.stride[1], conv.windows.dilation[1]) == (2, 1)
    numbers = conv.image.dtype == conv.weight.dtype and conv.image.dtype in (FLOAT16, BFLOAT16)
    few = conv.groups == 1 and conv.channels <= _MAX_CHANNELS and is_packed_weight(conv.weight)
    return by_twos and numbers and few and offers(device, WARPGROUPS)


def fits_windows(conv: Convolution, work: DirectedGroup) -> bool:
    """Whether a convolution whose operands are of one 16-bit type can be lowered this way."""
    if not is_of_few_channels(conv, work.device):
        return False
    tiles = _tiles(conv)
    return window_under(conv, tiles).fits(conv) and fits_window_tiles(conv, work, tiles)


def lower_windows(conv: Convolution, work: DirectedGroup) -> KernelCall:
    """One launch: a block takes tiles of results in turn."""
    tiles, device = _tiles(conv), work.device
    blocks = _Costs.of(device).blocks
    macros = pixel_macros(conv, window_under(conv, tiles), blocks)
    return window_launch(CONV2D_WINDOW, conv, work, macros, tiles, blocks * device.cores)


def _tiles(conv: Convolution) -> Tiles:
    return tiles_of(conv, 2)


def pixel_macros(conv: Convolution, window: Window, blocks: int) -> dict[str, object]:
    """What a kernel is told of the pixels and of what its tiles read; `blocks` should fit a multiprocessor."""
    return {
        **_geometry(conv),
        "BLOCKS": blocks,
        "BEFORE": window.before,
        "PAIRS": window.pairs,
        "LINE": window.line,
        "LINES": window.lines,
        "WINDOW_BYTES": window.nbytes,
    }


def window_under(conv: Convolution, tiles: Tiles) -> Window:
    """The window of a convolution, and what is read for a tile of its results."""
    taps_y, taps_x = conv.windows.kernel
    before = conv.windows.padding[1] % 2
    pairs = (taps_x + before + 1) // 2
    return Window(before, pairs, taps_y * pairs, tiles.x - 1 + pairs, conv.windows.span(0, tiles.y))


def _geometry(conv: Convolution) -> dict[str, object]:
    """What the kernel knows of the image's strides when it is compiled."""
    image = conv.image
    _, channels, _, width = image.shape
    strides = {name: value for name, value in image_macros(image, conv.shape).items() if name.endswith("_STRIDE")}
    image_stride, channel_stride, y_stride, x_stride = image.strides
    followed = (channels == 1 or channel_stride == 1) and x_stride == channels
    even = all(number % 2 == 0 for number in (width, y_stride, image_stride, image.offset))
    return {
        "CHANNELS": channels,
        "CONTIGUOUS": int(followed and even),
        **strides,
        "WEIGHT_TAPS_X": packed_weight(conv.weight.shape)[3],
        "STEP_Y": conv.windows.stride[0],
    }
