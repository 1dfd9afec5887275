"""Tiles of results that a warpgroup computes from windows where they lie in shared memory; see `window_tile.cuh`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cuda_compiler.dialect import CUDA
from cuda_compiler.epilogues import element_functions
from cuda_compiler.images.directions import BACKWARDS, DirectedGroup
from cuda_compiler.images.image_packing import along_axes
from cuda_compiler.short_codes import in_few_instructions
from cuda_compiler.tiles.wgmma import warpgroup_product
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16, INT8, UINT8
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.templates import Amount, KernelTemplate, Launch

__all__ = ["GROUP_THREADS", "OUTPUTS", "RESULT_BYTES", "STAGED_BYTES", "TILE_X", "TILE_Y", "Tiles"]
__all__ += ["fits_window_tiles", "stores_by_channel", "tiles_of", "window_launch", "window_template"]

TILE_X, TILE_Y = 8, 16  # results; 8 neighbours are what tensor cores read at a time
OUTPUTS, GROUP_THREADS = 64, 128
_CHUNK = 8  # results that are stored together
STAGED_BYTES = 2 * OUTPUTS + 16  # of shared memory for a result; neighbours begin in different banks
_STORED = (FLOAT16, BFLOAT16, INT8, UINT8)
_LEAST_FILLED = 4  # of so many results of all tiles, one must be in the image
RESULT_BYTES = TILE_X * TILE_Y * STAGED_BYTES


@dataclass(frozen=True)
class Tiles:
    """The tiles that a launch takes.

    Attributes:
        x, y: Results of a tile that are computed.
        stored_x, stored_y: What is stored of it, along the same axes.
        count: Tiles, for each 64 output channels.
        columns: Results of one product, whose weights are in registers.
    """

    x: int
    y: int
    stored_x: int
    stored_y: int
    count: int
    columns: int

    def is_filled(self, shape: Sequence[int]) -> bool:
        """Whether enough of what all tiles store of [N, C, H, W] is in the image, which of a line it is not."""
        stored = shape[0] * prod(shape[2:])
        return _LEAST_FILLED * stored >= self.count * self.stored_x * self.stored_y


def fits_window_tiles(conv: Convolution, work: DirectedGroup, tiles: Tiles) -> bool:
    """Whether results can be stored by channel, and enough of all tiles' results are in the image."""
    return stores_by_channel(conv, work) and tiles.is_filled(conv.shape)


def stores_by_channel(conv: Convolution, work: DirectedGroup) -> bool:
    """Whether the epilogue reads nothing by pixel and stores 16 bytes at a time, and no kernel makes the weights.

    They are read before the kernel ahead has finished.
    """
    walks = work.found.operands.walks
    by_channel = not work.found.statements and not any(any(walks[key][:-1]) for key in walks if key is not None)
    whole = work.pack_size(width=conv.shape[1]) == _CHUNK
    return conv.weight.is_constant and by_channel and whole and work.group.output.dtype in _STORED


def tiles_of(conv: Convolution, products: int, lines: int = TILE_Y) -> Tiles:
    """Tiles of so many lines, all of whose results are stored, which take so many products one beside another."""
    batch, _, height, width = conv.shape
    count = batch * ceil_div(height, lines) * ceil_div(width, TILE_X)
    return Tiles(TILE_X, lines, TILE_X, lines, count, TILE_X * lines // products)


def _geometry(conv: Convolution) -> dict[str, object]:
    """What the kernels know of the image and of the taps when they are compiled."""
    windows = conv.windows
    return {
        "HEIGHT": conv.image.shape[2],
        "WIDTH": conv.image.shape[3],
        **along_axes(TAPS=windows.kernel),
        "DILATION_Y": windows.dilation[0],
        **along_axes(PAD=windows.padding),
        "COLUMNS": conv.shape[1],
        "OUT_HEIGHT": conv.shape[2],
        "OUT_WIDTH": conv.shape[3],
    }


def window_template(entry: str, macros: str, threads: int, shared_bytes: Amount, files: str = "") -> KernelTemplate:
    """The template of a kernel that computes such tiles.

    Args:
        entry: The kernel.
        macros: What it expects beside what is common to these kernels.
        threads, shared_bytes: Of a block.
        files: Further files that it builds on.
    """
    common = "HEIGHT WIDTH TAPS_Y TAPS_X DILATION_Y PAD_Y PAD_X COLUMNS OUT_HEIGHT OUT_WIDTH tile_t"
    return KernelTemplate(
        entry,
        params=f"int {BACKWARDS}, tiles",
        macros=f"{common} TILE_X TILE_Y STAGED_BYTES {macros}",
        inputs="image weight",
        threads=threads,
        shared_bytes=shared_bytes,
        files=f"tensor_cores.cuh warpgroups.cuh barriers.cuh window_tile.cuh {files}",
    )


def window_launch(
    template: KernelTemplate,
    conv: Convolution,
    work: DirectedGroup,
    macros: Mapping[str, object],
    tiles: Tiles,
    blocks: int,
    in_registers: bool = True,
) -> KernelCall:
    """A launch of one of the kernels that compute such tiles.

    Args:
        template: The kernel.
        conv: What to compute.
        work: The same, with its epilogue.
        macros: What the kernel expects beside what is common to these kernels.
        tiles: How its results are cut.
        blocks: Blocks for each 64 output channels that run at a time.
        in_registers: Whether weights are multiplied from registers, not from shared memory.
    """
    group = in_few_instructions(work.group)
    dtype = conv.image.dtype
    common = {"tile_t": CUDA.storage[dtype.name], "TILE_X": tiles.x, "TILE_Y": tiles.y, "STAGED_BYTES": STAGED_BYTES}
    generated = (
        element_functions(group, work.found, "int batch, int row, int col, "),
        warpgroup_product(tiles.columns, dtype.name, a_in_registers=in_registers),
    )
    launch = Launch(
        template,
        grid=(min(tiles.count, blocks), ceil_div(conv.shape[1], OUTPUTS), 1),
        values={BACKWARDS: work.backwards, "tiles": tiles.count},
        macros={**_geometry(conv), **common, **macros},
        inputs=conv.arguments,
        flops=conv.flops,
        text="\n".join(generated),
    )
    return work.directed(launch, _CHUNK)
