"""Lowers convolutions whose windows overlap: what a tile of results reads is brought to shared memory once."""

from __future__ import annotations

from cuda_compiler.anchors import anchor_source
from cuda_compiler.images.image_packing import CHUNK, is_packed_image
from cuda_compiler.images.window_tiles import (
    GROUP_THREADS,
    OUTPUTS,
    RESULT_BYTES,
    TILE_X,
    TILE_Y,
    fits_window_tiles,
    tiles_of,
    window_launch,
)
from cuda_compiler.tiles.tiling import MULTIPROCESSORS
from cuda_compiler.tiles.wgmma import SHARED_BYTES
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.target import Lowering

__all__ = ["fits_overlaps", "lower_overlaps"]

_GROUPS = 2  # warpgroups of a block: one multiplies while the other one stores
_MAX_STEPS = 36  # of 16 products: their weights stay in registers
_LEAST_ROUNDS = 4  # tiles of a warpgroup that make up for the weights' way to the registers


def fits_overlaps(group: Group, lowering: Lowering) -> bool:
    """Whether a convolution whose weights lie in chunks can be lowered this way, and has tiles enough to gain by it."""
    source = anchor_source(group)
    outputs, channels, taps_y, taps_x = source.operands[1].view.shape
    attrs = source.attrs
    plain = attrs["groups"] == 1 and tuple(attrs["stride"]) == (1, 1) and group.added is None
    whole = channels % (2 * CHUNK) == 0 and outputs % OUTPUTS == 0 and is_packed_image(source.operands[0], channels)
    short = taps_y * taps_x > 1 and taps_y * taps_x * channels <= 16 * _MAX_STEPS
    enough = tiles_of(group) >= _LEAST_ROUNDS * _GROUPS * _blocks(group)
    fits = _GROUPS * _group_bytes(group) <= SHARED_BYTES
    return plain and whole and short and enough and fits and fits_window_tiles(group, lowering)


def lower_overlaps(group: Group, lowering: Lowering) -> KernelCall:
    """One launch: the warpgroups of a block take tiles of results in turn.

    Raises:
        OpRefusal: A tensor is too large.
    """
    lines, line = _lines(group)
    macros = {
        "CHANNELS": anchor_source(group).operands[1].view.shape[1],
        "DILATION_X": anchor_source(group).attrs["dilation"][1],
        "GROUPS": _GROUPS,
        "LINE": line,
        "LINES": lines,
        "PLANE_BYTES": _plane(group),
        "GROUP_BYTES": _group_bytes(group),
    }
    return window_launch(
        "conv2d_overlap",
        group,
        lowering,
        macros,
        blocks=min(-(-tiles_of(group) // _GROUPS), _blocks(group)),
        threads=_GROUPS * GROUP_THREADS,
        shared_bytes=_GROUPS * _group_bytes(group),
        columns=TILE_X * TILE_Y,
    )


def _blocks(group: Group) -> int:
    """Blocks for each 64 output channels that run at a time."""
    return max(1, MULTIPROCESSORS // -(-group.shape[1] // OUTPUTS))


def _lines(group: Group) -> tuple[int, int]:
    """Lines of pixels that a tile of results reads, and pixels of a line."""
    source = anchor_source(group)
    _, _, taps_y, taps_x = source.operands[1].view.shape
    dilation_y, dilation_x = source.attrs["dilation"]
    return TILE_Y + (taps_y - 1) * dilation_y, TILE_X + (taps_x - 1) * dilation_x


def _plane(group: Group) -> int:
    """Bytes of a plane of eight channels; neighbours begin in different banks."""
    lines, line = _lines(group)
    return -(-lines * line * 16 // 128) * 128 + 16


def _group_bytes(group: Group) -> int:
    """Shared memory of a warpgroup: pixels at work and on their way, and results."""
    channels = anchor_source(group).operands[1].view.shape[1]
    return 2 * (channels // CHUNK) * _plane(group) + RESULT_BYTES
