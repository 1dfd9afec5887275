"""Lowers convolutions of few channels that move on by two pixels: their windows are multiplied where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cuda_compiler.anchors import anchor_launch, anchor_source
from cuda_compiler.dialect import CUDA
from cuda_compiler.image_packing import packed_weight
from cuda_compiler.packing import element_functions, pack_size, resolve_anchor
from cuda_compiler.tiles import MULTIPROCESSORS
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.target import Launch, Lowering
from npu_compiler.dtypes import BFLOAT16, FLOAT16

__all__ = ["fits_windows", "lower_windows"]

_IMAGE_DIMS = ((), (0, 2, 3), (1,))
_TILE_X, _TILE_Y = 8, 16  # results; 8 neighbours are what tensor cores read at a time
_OUTPUTS, _THREADS = 64, 128  # of a block
_CHUNK = 8  # results that are stored together
_STAGED_BYTES = 2 * _OUTPUTS + 16  # of shared memory for a result; neighbours begin in different banks
_BLOCKS = 3  # that share a multiprocessor
_AHEAD = 3  # rounds of tiles for which pixels are asked for
_MAX_CHANNELS = 4  # two pixels of so many make 16 bytes
_MAX_STEPS = 16  # of 16 products: their weights stay in registers
_MAX_WORDS = 24  # of a tile's pixels that a thread has on their way


@dataclass(frozen=True)
class _Window:
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
        return -(-self.line * self.lines * 16 // 128) * 128


def fits_windows(group: Group, lowering: Lowering) -> bool:
    """Whether a convolution whose operands are of one 16-bit type can be lowered this way."""
    source = anchor_source(group)
    found = resolve_anchor(group, lowering, _IMAGE_DIMS)
    if group.output.dtype not in (FLOAT16, BFLOAT16) or pack_size(group, found.operands, group.shape[1]) < _CHUNK:
        return False
    weight = source.operands[1].view.shape
    if source.attrs["groups"] != 1 or weight[1] > _MAX_CHANNELS:
        return False
    if (source.attrs["stride"][1], source.attrs["dilation"][1]) != (2, 1):
        return False
    window = _window(group)
    words = -(-window.line * window.lines // _THREADS) * weight[1]
    return 2 <= window.chunks <= 2 * _MAX_STEPS and words <= _MAX_WORDS


def lower_windows(group: Group, lowering: Lowering) -> Launch:
    """One launch: a block takes tiles of results in turn.

    Raises:
        OpRefusal: A tensor is too large.
    """
    source = anchor_source(group)
    image_ref, weight_ref = source.operands
    image, weight = lowering.tensors[image_ref.tensor], lowering.tensors[weight_ref.tensor]
    batch, outputs, out_height, out_width = group.shape
    found = resolve_anchor(group, lowering, _IMAGE_DIMS)
    window = _window(group)
    tiles = batch * -(-out_height // _TILE_Y) * -(-out_width // _TILE_X)
    macros = {
        **_geometry(group),
        "TILE_X": _TILE_X,
        "TILE_Y": _TILE_Y,
        "BLOCKS": _BLOCKS,
        "AHEAD": _AHEAD,
        "BEFORE": window.before,
        "PAIRS": window.pairs,
        "LINE": window.line,
        "LINES": window.lines,
        "WINDOW_BYTES": window.nbytes,
        "STAGED_BYTES": _STAGED_BYTES,
        "tile_t": CUDA.storage[image.dtype.name],
        "WGMMA_TYPE": '"bf16"' if image.dtype == BFLOAT16 else '"f16"',
    }
    return anchor_launch(
        "conv2d_window",
        group,
        lowering,
        found,
        size=_CHUNK,
        inputs=[
            TensorArg(t.index, ref.view.offset * t.dtype.size) for t, ref in ((image, image_ref), (weight, weight_ref))
        ],
        values={"tiles": tiles},
        macros=macros,
        flops=2 * prod(group.shape) * prod(weight_ref.view.shape[1:]),
        blocks=min(tiles, _BLOCKS * MULTIPROCESSORS),
        splits=-(-outputs // _OUTPUTS),
        threads=_THREADS,
        shared_bytes=window.nbytes + _TILE_X * _TILE_Y * _STAGED_BYTES,
        generated=element_functions(group, found, "int batch, int row, int col, "),
    )


def _window(group: Group) -> _Window:
    source = anchor_source(group)
    _, _, taps_y, taps_x = source.operands[1].view.shape
    attrs = source.attrs
    before = attrs["padding"][1] % 2
    pairs = (taps_x + before + 1) // 2
    lines = (_TILE_Y - 1) * attrs["stride"][0] + (taps_y - 1) * attrs["dilation"][0] + 1
    return _Window(before, pairs, taps_y * pairs, _TILE_X - 1 + pairs, lines)


def _geometry(group: Group) -> dict[str, object]:
    """What the kernel knows of the image and of the taps when it is compiled."""
    source = anchor_source(group)
    image, weight = (ref.view for ref in source.operands)
    _, channels, height, width = image.shape
    image_stride, channel_stride, y_stride, x_stride = image.strides
    followed = (channels == 1 or channel_stride == 1) and x_stride == channels
    even = all(number % 2 == 0 for number in (width, y_stride, image_stride, image.offset))
    return {
        "CHANNELS": channels,
        "CONTIGUOUS": int(followed and even),
        "HEIGHT": height,
        "WIDTH": width,
        "IMAGE_STRIDE": image_stride,
        "CHANNEL_STRIDE": channel_stride,
        "Y_STRIDE": y_stride,
        "X_STRIDE": x_stride,
        "TAPS_Y": weight.shape[2],
        "TAPS_X": weight.shape[3],
        "WEIGHT_TAPS_X": packed_weight(weight.shape)[3],
        "STEP_Y": source.attrs["stride"][0],
        "DILATION_Y": source.attrs["dilation"][0],
        "PAD_Y": source.attrs["padding"][0],
        "PAD_X": source.attrs["padding"][1],
        "COLUMNS": group.shape[1],
        "OUT_HEIGHT": group.shape[2],
        "OUT_WIDTH": group.shape[3],
    }
