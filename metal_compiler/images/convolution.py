"""Lowers convolution: as a tiled product where tiles fill, else one output channel after the other."""

from __future__ import annotations

from metal_compiler.anchors import single_launch
from metal_compiler.dialect import METAL
from metal_compiler.images.geometry import (
    IMAGE_PARAMS,
    THREADS,
    WINDOW_PARAMS,
    channels_per_thread,
    thread_groups,
    window_values,
)
from metal_compiler.tiles.tiling import (
    GROUP,
    MAX_GRID,
    TILE_THREADS,
    Asked,
    best_tiling,
    chunk_of,
    tile_dtype,
)
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.windows import image_values
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch
from npu_compiler.tensor.view import collapse

__all__ = ["CONV2D", "CONV2D_DIRECT", "lower_conv2d"]

CONV2D = KernelTemplate(
    "conv2d",
    params=(  # the depth says how many lines of taps there are
        f"int pixels, columns, depth, channels, {IMAGE_PARAMS}, {WINDOW_PARAMS.removeprefix('kernel_height, ')}, "
        "weight_row, weight_col, weight_columns"
    ),
    macros="a_t b_t tile_t TILE_M TILE_N TILE_K A_CHUNK B_CHUNK",
    inputs="image weight",
    threads=TILE_THREADS,
    files="store.metal tile.metal",
)
CONV2D_DIRECT = KernelTemplate(
    "conv2d_direct",
    params=(
        f"int pixels, chunks, outputs, group_outputs, group_inputs, {IMAGE_PARAMS}, {WINDOW_PARAMS}, weight_y, "
        "weight_x, weight_input, weight_output"
    ),
    macros="a_t b_t CHANNELS DEPTHWISE",
    inputs="image weight",
    threads=THREADS,
    files="store.metal",
)

_MIN_TILED_OUTPUTS = 16  # output channels of a group from which on a tile is worth it


@lowering_of(Convolution)
def lower_conv2d(conv: Convolution, group: Group, lowering: Lowering) -> list[KernelCall]:
    """Convolutions of images and weights in any layout."""
    filled = conv.groups == 1 or (conv.outputs >= _MIN_TILED_OUTPUTS and conv.groups <= MAX_GRID)
    row_stride = _row_stride(conv.weight)
    if filled and row_stride is not None:
        return [_tiled(conv, row_stride, group, lowering)]
    return [_direct(conv, group, lowering)]


def _row_stride(weight: Operand) -> int | None:
    """Distance in a weight from one k to the next, k running over (KH, KW, I); None where it varies."""
    order = (2, 3, 1)
    sizes, (strides,) = collapse(tuple(weight.shape[d] for d in order), [tuple(weight.strides[d] for d in order)])
    return strides[0] if len(sizes) == 1 else None


def _tiled(conv: Convolution, row_stride: int, group: Group, lowering: Lowering) -> KernelCall:
    image, weight = conv.image, conv.weight
    tile = tile_dtype(image.dtype, weight.dtype)
    tiling = best_tiling(Asked(conv.pixels, conv.outputs, conv.depth, conv.groups, tile), lowering.device)
    readable = weight.readable(0) if conv.groups == 1 else conv.outputs
    launch = Launch(
        CONV2D,
        grid=(ceil_div(conv.pixels, tiling.rows), ceil_div(conv.outputs, tiling.columns), conv.groups),
        values=CONV2D.values_among({
            "pixels": conv.pixels, "columns": conv.outputs, "depth": conv.depth, "channels": conv.channels,
            **image_values(image, conv.shape), **window_values(conv.windows),
            "weight_row": row_stride, "weight_col": weight.strides[0], "weight_columns": readable,
        }),
        macros={
            **tiling.macros(image.dtype, weight.dtype, tile),
            "A_CHUNK": chunk_of(image.dtype, tile, image.strides[1], (*image.across(1), conv.channels)),
            "B_CHUNK": chunk_of(weight.dtype, tile, weight.strides[0], (weight.offset, row_stride, readable)),
        },
        inputs=conv.arguments,
        flops=conv.flops,
    )  # fmt: skip
    return single_launch(launch, group, lowering)


def _direct(conv: Convolution, group: Group, lowering: Lowering) -> KernelCall:
    image, weight = conv.image, conv.weight
    readable = weight.strides[0] == 1 and weight.readable(0) % GROUP == 0
    per_thread = channels_per_thread(image) if readable else 1
    groups, counts = thread_groups(conv.shape, per_thread)
    launch = Launch(
        CONV2D_DIRECT,
        grid=(groups, 1, 1),
        values={
            **counts, "outputs": conv.shape[1], "group_outputs": conv.outputs, "group_inputs": conv.channels,
            **image_values(image, conv.shape), **window_values(conv.windows),
            **weight.named_strides("weight", ("output", "input", "y", "x")),
        },
        macros={
            "a_t": METAL.storage[image.dtype.name],
            "b_t": METAL.storage[weight.dtype.name],
            "CHANNELS": per_thread,
            "DEPTHWISE": int(conv.outputs == conv.channels == 1),
        },
        inputs=conv.arguments,
        flops=conv.flops,
    )  # fmt: skip
    return single_launch(launch, group, lowering)
