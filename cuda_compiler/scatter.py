"""Lowers rows that are combined where an index says: a block looks through the index for what its rows take."""

from __future__ import annotations

from cuda_compiler.anchors import anchor_epilogue, anchor_launch
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import PACK_SIZES, pack_size
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import Positions, epilogue_positions
from npu_compiler.lowering.problems.operand import are_chunks
from npu_compiler.lowering.problems.scatter import ScatterRows
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["SCATTER_ROWS", "lower_scatter_rows"]

_THREADS = 256
_CHUNK = 8192  # indices that a block looks through at a time
_MOST_SUMS = 32  # numbers that a thread holds
_COMBINE = {"sum": "combine_sum", "mean": "combine_sum", "prod": "combine_prod", "amax": "combine_max"}
_COMBINE |= {"amin": "combine_min"}
_NEUTRAL = {"prod": 1.0, "amax": float("-inf"), "amin": float("inf")}

SCATTER_ROWS = KernelTemplate(
    "scatter_rows",
    params=(
        "int rows, width, count, index_step, base_outer, base_row, base_column, values_outer, values_row, "
        "values_column, row_blocks, column_blocks"
    ),
    macros="b_t v_t LANES EACH INDEX_PACK COMBINE NEUTRAL MEAN INCLUDED HAS_BASE FILL CHUNK",
    inputs="index values base?",
    threads=_THREADS,
)


@lowering_of(ScatterRows)
def lower_scatter_rows(scatter: ScatterRows, group: Group, lowering: Lowering) -> list[KernelCall]:
    """A block computes some rows of a range of columns; it combines their values in order, so always alike.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    found = epilogue_positions(group, lowering, "sum")
    size = _pack_size(scatter, group, found)
    outer, rows, width = scatter.shape
    packs = ceil_div(width, size)
    lanes = min(_THREADS, 1 << (packs - 1).bit_length())
    each = _each(scatter, size, lanes, lowering.device)
    row_blocks, column_blocks = ceil_div(rows, _THREADS // lanes * each), ceil_div(packs, lanes)
    values, base = scatter.values, scatter.base
    launch = Launch(
        SCATTER_ROWS,
        grid=(row_blocks * column_blocks * outer, 1, 1),
        values={**scatter.sizes, "row_blocks": row_blocks, "column_blocks": column_blocks},
        macros={
            "v_t": CUDA.storage[values.dtype.name],
            "b_t": CUDA.storage[(base or values).dtype.name],
            "LANES": lanes,
            "EACH": each,
            "INDEX_PACK": 4 if are_chunks(4, scatter.index.strides[0], (scatter.index.offset,)) else 1,
            "COMBINE": _COMBINE[scatter.how],
            "NEUTRAL": CUDA.literal(_NEUTRAL.get(scatter.how, 0.0), scatter.result.dtype),
            "MEAN": int(scatter.how == "mean"),
            "INCLUDED": int(scatter.include_self),
            "HAS_BASE": int(base is not None),
            "FILL": CUDA.literal(scatter.fill, scatter.result.dtype),
            "CHUNK": _CHUNK,
        },
        inputs={
            "index": scatter.index.argument,
            "values": values.argument,
            **({} if base is None else {"base": base.argument}),
        },
        flops=scatter.flops,
    )
    return [anchor_launch(launch, anchor_epilogue(group, found, size), lowering)]


def _each(scatter: ScatterRows, size: int, lanes: int, device: DeviceModel) -> int:
    """Rows of a thread: as many as leave work for all multiprocessors, so that few blocks look through the index."""
    outer, rows, width = scatter.shape
    blocks = outer * rows * ceil_div(width, size * lanes) * lanes // _THREADS
    each = 1
    while 2 * each * size <= _MOST_SUMS and lanes > 1 and blocks // (2 * each) >= 2 * device.cores:
        each *= 2
    return each


def _pack_size(scatter: ScatterRows, group: Group, found: Positions) -> int:
    """Columns of a thread: those that the epilogue stores together, where values and base can be read that way too."""
    read = [operand for operand in (scatter.values, scatter.base) if operand is not None]
    size = pack_size(group, found.operands, scatter.shape[2])
    while size > 1 and not all(are_chunks(size, each.strides[2], each.across(2)) for each in read):
        size //= 2
    return size if size in PACK_SIZES else 1
