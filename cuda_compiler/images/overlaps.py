"""Lowers convolutions whose windows overlap: what a tile of results reads is brought to shared memory once."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.devices import offers
from cuda_compiler.images.directions import DirectedGroup
from cuda_compiler.images.image_packing import is_packed_image
from cuda_compiler.images.window_tiles import (
    GROUP_THREADS,
    OUTPUTS,
    STAGED_BYTES,
    TILE_X,
    Tiles,
    fits_window_tiles,
    tiles_of,
    window_launch,
    window_template,
)
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.problems.convolution import Convolution

__all__ = ["CONV2D_OVERLAP", "fits_overlaps", "lower_overlaps"]

_PATTERN_BYTES = 1024
_TILE_LINES = (16, 14, 12)  # in pairs
_GROUPS = 3  # warpgroups of a block: one multiplies while others store
_CHANNELS = (16, 32, 64)  # whose bytes the tensor cores permute
_MAX_STEPS = 36  # of 16 products: their weights stay in shared memory

CONV2D_OVERLAP = window_template(
    "conv2d_overlap",
    "CHANNELS DILATION_X GROUPS LINE LINES WINDOW_BYTES",
    threads=_GROUPS * GROUP_THREADS,
    shared_bytes=lambda macros: _shared_bytes(
        macros["TAPS_Y"] * macros["TAPS_X"] * macros["CHANNELS"], macros["WINDOW_BYTES"]
    ),
)


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="overlaps"):
    """How many tiles of a warpgroup make up for the weights' way to shared memory."""

    least_rounds: int


def fits_overlaps(conv: Convolution, work: DirectedGroup) -> bool:
    """Whether a convolution whose weights lie in chunks can be lowered this way, and has tiles enough to gain by it."""
    device = work.device
    if not offers(device, WARPGROUPS):
        return False
    outputs, channels, taps_y, taps_x = conv.weight.shape
    plain = conv.groups == 1 and conv.windows.stride == (1, 1) and work.group.added is None
    whole = channels in _CHANNELS and outputs % OUTPUTS == 0 and is_packed_image(conv.image, channels)
    short = taps_y * taps_x > 1 and taps_y * taps_x * channels <= 16 * _MAX_STEPS
    tiles = _tiles(conv)
    rounds = _Costs.of(device).least_rounds
    enough = tiles.count >= rounds * _GROUPS * _blocks(conv, device)
    fits = _shared_bytes(conv.depth, _window_bytes(conv)) <= device.shared_bytes
    return plain and whole and short and enough and fits and fits_window_tiles(conv, work, tiles)


def lower_overlaps(conv: Convolution, work: DirectedGroup) -> KernelCall:
    """One launch: the warpgroups of a block take tiles of results in turn."""
    lines, line = _lines(conv)
    macros = {
        "CHANNELS": conv.channels,
        "DILATION_X": conv.windows.dilation[1],
        "GROUPS": _GROUPS,
        "LINE": line,
        "LINES": lines,
        "WINDOW_BYTES": _window_bytes(conv),
    }
    tiles = _tiles(conv)
    blocks = min(ceil_div(tiles.count, _GROUPS), _blocks(conv, work.device))
    return window_launch(CONV2D_OVERLAP, conv, work, macros, tiles, blocks, in_registers=False)


def _tiles(conv: Convolution) -> Tiles:
    """Tiles of as many lines as leave the fewest beyond the image."""
    height = conv.shape[2]
    return tiles_of(conv, 1, min(_TILE_LINES, key=lambda lines: ceil_div(height, lines) * lines))


def _blocks(conv: Convolution, device: DeviceModel) -> int:
    """Blocks for each 64 output channels that run at a time."""
    return max(1, device.cores // ceil_div(conv.shape[1], OUTPUTS))


def _lines(conv: Convolution) -> tuple[int, int]:
    """Lines of pixels that a tile of results reads, and pixels of a line."""
    return conv.windows.span(0, _tiles(conv).y), conv.windows.span(1, TILE_X)


def _window_bytes(conv: Convolution) -> int:
    """Of the pixels that a tile reads; whole patterns of what is permuted."""
    lines, line = _lines(conv)
    pixels, results = lines * line * conv.channels * 2, TILE_X * _tiles(conv).y * STAGED_BYTES
    return ceil_div(max(pixels, results), _PATTERN_BYTES) * _PATTERN_BYTES


def _shared_bytes(depth: int, window_bytes: int) -> int:
    """Shared memory of a block: the weights and, for each warpgroup, pixels at work and on their way.

    Results take the place of the pixels that they are made of.
    """
    return OUTPUTS * depth * 2 + _GROUPS * 2 * window_bytes
