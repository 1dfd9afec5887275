"""Lowers convolution: as a tiled product where tiles fill, else one output channel after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from metal_compiler.anchors import KernelText, anchor_kernel, anchor_of
from metal_compiler.images.geometry import (
    IMAGE_DIMS,
    IMAGE_FIELDS,
    THREADS,
    WINDOW_FIELDS,
    Image,
    thread_groups,
    window_values,
)
from metal_compiler.tiles.tiling import (
    GROUP,
    MAX_GRID,
    TILE_THREADS,
    check_size,
    chunk_of,
    tile_columns,
    tile_depth,
    tile_dtype,
    tile_rows,
)
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.lowering.dialect import Dialect
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.target import Lowering
from npu_compiler.tensor.trace import Anchor, TracedTensor
from npu_compiler.tensor.view import View, collapse

__all__ = ["CONV2D_FIELDS", "DIRECT_FIELDS", "lower_conv2d"]

CONV2D_FIELDS = (
    *("pixels", "columns", "depth", "channels"),
    *IMAGE_FIELDS,
    *WINDOW_FIELDS,
    *("weight_row", "weight_col", "weight_columns"),
)
DIRECT_FIELDS = (
    *("pixels", "chunks", "outputs", "group_outputs", "group_inputs"),
    *IMAGE_FIELDS,
    *WINDOW_FIELDS,
    *("weight_y", "weight_x", "weight_input", "weight_output"),
)

_MIN_TILED_OUTPUTS = 16  # output channels of a group from which on a tile is worth it


@dataclass(frozen=True)
class _Convolution:
    """A convolution's operands: the image, the weight [O, I / groups, KH, KW], and how windows slide."""

    image: Image
    weight: TracedTensor
    filters: View
    groups: int
    windows: Mapping[str, int]

    @property
    def group_outputs(self) -> int:
        return self.filters.shape[0] // self.groups

    @property
    def group_inputs(self) -> int:
        return self.filters.shape[1]

    @property
    def depth(self) -> int:
        """Products that each result sums."""
        return prod(self.filters.shape[1:])

    @property
    def row_stride(self) -> int | None:
        """Distance in the weight from one k to the next, k running over (KH, KW, I); None where it varies."""
        order = (2, 3, 1)
        sizes, (strides,) = collapse(
            tuple(self.filters.shape[d] for d in order), [tuple(self.filters.strides[d] for d in order)]
        )
        return strides[0] if len(sizes) == 1 else None

    @property
    def readable_outputs(self) -> int:
        """Output channels whose weights may be read, padding included."""
        whole = self.filters == self.weight.view and self.filters.strides[0] == 1
        return self.weight.layout.alloc_shape[0] if whole else self.filters.shape[0]

    @property
    def arguments(self) -> tuple[Argument, Argument]:
        return self.image.argument, Argument(self.weight.index, self.filters.offset * self.weight.dtype.size)


def lower_conv2d(group: Group, lowering: Lowering, dialect: Dialect) -> list[KernelCall]:
    """Convolutions of images and weights in any layout.

    Raises:
        OpRefusal: A tensor is too large.
    """
    conv = _convolution(anchor_of(group), lowering)
    check_size(conv.image.tensor)
    check_size(conv.weight)
    filled = conv.groups == 1 or (conv.group_outputs >= _MIN_TILED_OUTPUTS and conv.groups <= MAX_GRID)
    if filled and conv.row_stride is not None:
        return [_tiled(conv, conv.row_stride, group, lowering, dialect)]
    return [_direct(conv, group, lowering, dialect)]


def _convolution(anchor: Anchor, lowering: Lowering) -> _Convolution:
    source, filters = anchor.operands
    attrs: Mapping[str, Any] = anchor.attrs
    kernel = (filters.view.shape[2], filters.view.shape[3])
    windows = window_values(kernel, attrs["stride"], attrs["padding"], attrs["dilation"])
    image = Image.of(source, lowering.tensors[source.tensor])
    return _Convolution(image, lowering.tensors[filters.tensor], filters.view, attrs["groups"], windows)


def _tiled(conv: _Convolution, row_stride: int, group: Group, lowering: Lowering, dialect: Dialect) -> KernelCall:
    image, filters = conv.image, conv.filters
    tile = tile_dtype(image.tensor.dtype, conv.weight.dtype)
    pixels, columns = group.shape[0] * prod(group.shape[2:]), conv.group_outputs
    rows, width = tile_rows(pixels), tile_columns(columns)
    readable = conv.readable_outputs if conv.groups == 1 else columns
    definitions = {
        "a_t": dialect.storage[image.tensor.dtype.name],
        "b_t": dialect.storage[conv.weight.dtype.name],
        "tile_t": dialect.storage[tile.name],
        "TILE_M": rows,
        "TILE_N": width,
        "TILE_K": tile_depth(tile),
        "A_CHUNK": chunk_of(image.tensor.dtype, tile, image.view.strides[1], (*image.alignment, conv.group_inputs)),
        "B_CHUNK": chunk_of(conv.weight.dtype, tile, filters.strides[0], (filters.offset, row_stride, readable)),
    }
    text = KernelText("conv2d", 2, CONV2D_FIELDS, definitions, ("store.metal", "tile.metal"))
    kernel = anchor_kernel(text, group, lowering, dialect, IMAGE_DIMS)
    values = {
        "pixels": pixels, "columns": columns, "depth": conv.depth, "channels": conv.group_inputs,
        **image.values(group.shape), **conv.windows,
        "weight_row": row_stride, "weight_col": filters.strides[0], "weight_columns": readable,
    }  # fmt: skip
    grid = (-(-pixels // rows), -(-columns // width), conv.groups)
    return kernel.launch(conv.arguments, values, grid, TILE_THREADS, _flops(conv, group))


def _direct(conv: _Convolution, group: Group, lowering: Lowering, dialect: Dialect) -> KernelCall:
    image, filters = conv.image, conv.filters
    readable = filters.strides[0] == 1 and conv.readable_outputs % GROUP == 0
    per_thread = image.channels_per_thread() if readable else 1
    definitions = {
        "a_t": dialect.storage[image.tensor.dtype.name],
        "b_t": dialect.storage[conv.weight.dtype.name],
        "CHANNELS": per_thread,
        "DEPTHWISE": int(conv.group_outputs == conv.group_inputs == 1),
    }
    text = KernelText("conv2d_direct", 2, DIRECT_FIELDS, definitions, ("store.metal",))
    kernel = anchor_kernel(text, group, lowering, dialect, IMAGE_DIMS)
    groups, counts = thread_groups(group.shape, per_thread)
    output, inputs, y, x = filters.strides
    values = {
        **counts, "outputs": group.shape[1], "group_outputs": conv.group_outputs, "group_inputs": conv.group_inputs,
        **image.values(group.shape), **conv.windows,
        "weight_y": y, "weight_x": x, "weight_input": inputs, "weight_output": output,
    }  # fmt: skip
    return kernel.launch(conv.arguments, values, (groups, 1, 1), THREADS, _flops(conv, group))


def _flops(conv: _Convolution, group: Group) -> int:
    return 2 * prod(group.shape) * conv.depth
