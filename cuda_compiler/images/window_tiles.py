"""Tiles of results that a warpgroup computes from windows where they lie in shared memory; see `window_tile.cuh`."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from cuda_compiler.anchors import Epilogue, KernelText, LaunchShape, anchor_launch, anchor_source
from cuda_compiler.dialect import CUDA
from cuda_compiler.images.image_packing import IMAGE_DIMS
from cuda_compiler.packing import element_functions, pack_size, resolve_anchor
from cuda_compiler.tiles.wgmma import warpgroup_product
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.target import Lowering

__all__ = ["GROUP_THREADS", "OUTPUTS", "RESULT_BYTES", "TILE_X", "TILE_Y"]
__all__ += ["fits_window_tiles", "tiles_of", "window_launch"]

TILE_X, TILE_Y = 8, 16  # results; 8 neighbours are what tensor cores read at a time
OUTPUTS, GROUP_THREADS = 64, 128
_CHUNK = 8  # results that are stored together
_STAGED_BYTES = 2 * OUTPUTS + 16  # of shared memory for a result; neighbours begin in different banks
RESULT_BYTES = TILE_X * TILE_Y * _STAGED_BYTES


def fits_window_tiles(group: Group, lowering: Lowering) -> bool:
    """Whether the epilogue reads nothing by pixel and stores 16 bytes at a time, and no kernel makes the weights.

    They are read before the kernel ahead has finished.
    """
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    by_channel = not found.statements and all(
        not any(walk[:-1]) for key, walk in found.operands.walks.items() if key is not None
    )
    whole = pack_size(group, found.operands, group.shape[1]) == _CHUNK
    constant = lowering.tensors[anchor_source(group).operands[1].tensor].source is None
    return constant and by_channel and whole and group.output.dtype in (FLOAT16, BFLOAT16)


def tiles_of(group: Group) -> int:
    """Tiles of results, for each 64 output channels."""
    batch, _, height, width = group.shape
    return batch * -(-height // TILE_Y) * -(-width // TILE_X)


def _geometry(group: Group) -> dict[str, object]:
    """What the kernels know of the image and of the taps when they are compiled."""
    source = anchor_source(group)
    image, weight = (ref.view for ref in source.operands)
    return {
        "HEIGHT": image.shape[2],
        "WIDTH": image.shape[3],
        "TAPS_Y": weight.shape[2],
        "TAPS_X": weight.shape[3],
        "DILATION_Y": source.attrs["dilation"][0],
        "PAD_Y": source.attrs["padding"][0],
        "PAD_X": source.attrs["padding"][1],
        "COLUMNS": group.shape[1],
        "OUT_HEIGHT": group.shape[2],
        "OUT_WIDTH": group.shape[3],
    }


def window_launch(
    entry: str,
    group: Group,
    lowering: Lowering,
    macros: Mapping[str, object],
    *,
    blocks: int,
    threads: int,
    shared_bytes: int,
    columns: int,
) -> KernelCall:
    """A launch of one of the kernels that compute such tiles.

    Args:
        entry: The kernel.
        group: What to compute.
        lowering: Where the trace's tensors are.
        macros: What the kernel expects beside the geometry of image and taps.
        blocks: Blocks for each 64 output channels.
        threads: Threads of a block.
        shared_bytes: Its shared memory.
        columns: Results of one product, whose weights are in registers.

    Raises:
        OpRefusal: A tensor is too large.
    """
    refs = anchor_source(group).operands
    tensors = [lowering.tensors[ref.tensor] for ref in refs]
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    dtype = tensors[0].dtype
    common = {"tile_t": CUDA.storage[dtype.name], "TILE_X": TILE_X, "TILE_Y": TILE_Y, "STAGED_BYTES": _STAGED_BYTES}
    generated = (
        element_functions(group, found, "int batch, int row, int col, "),
        warpgroup_product(columns, dtype.name, a_in_registers=True),
    )
    return anchor_launch(
        KernelText(
            entry,
            values={"tiles": tiles_of(group)},
            macros={**_geometry(group), **common, **macros},
            generated="\n".join(generated),
            parts=("tensor_cores.cuh", "warpgroups.cuh", "window_tile.cuh"),
        ),
        LaunchShape(blocks=blocks, threads=threads, splits=-(-group.shape[1] // OUTPUTS), shared_bytes=shared_bytes),
        Epilogue(group, found, _CHUNK),
        lowering,
        inputs=[Argument(t.index, ref.view.offset * t.dtype.size) for t, ref in zip(tensors, refs, strict=True)],
        flops=2 * prod(group.shape) * prod(refs[1].view.shape[1:]),
    )
