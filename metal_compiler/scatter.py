"""Lowers rows that are combined where an index says: a threadgroup looks through the index for what its rows take."""

from __future__ import annotations

from metal_compiler.anchors import single_launch
from metal_compiler.dialect import METAL
from metal_compiler.tiles.tiling import GROUP
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.scatter import ScatterRows
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["SCATTER_ROWS", "lower_scatter_rows"]

_THREADS = 64
_CHUNK = 1024  # indices that a threadgroup looks through at a time
_COMBINE = {"sum": "added", "mean": "added", "prod": "multiplied", "amax": "greatest", "amin": "least"}

SCATTER_ROWS = KernelTemplate(
    "scatter_rows",
    params=(
        "int rows, width, count, index_step, base_outer, base_row, base_column, values_outer, values_row, "
        "values_column, row_blocks, column_blocks"
    ),
    macros="b_t v_t LANES COLUMNS COMBINE NEUTRAL MEAN INCLUDED HAS_BASE FILL CHUNK",
    inputs="index values base?",
    threads=_THREADS,
    files="store.metal",
)


@lowering_of(ScatterRows)
def lower_scatter_rows(scatter: ScatterRows, group: Group, lowering: Lowering) -> list[KernelCall]:
    """A threadgroup computes some rows of a range of columns; it combines their values in order, so always alike.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    outer, rows, width = scatter.shape
    columns = GROUP if width >= GROUP else 1
    chunks = ceil_div(width, columns)
    lanes = min(_THREADS, power_of_two(chunks))
    row_blocks, column_blocks = ceil_div(rows, _THREADS // lanes), ceil_div(chunks, lanes)
    values, base = scatter.values, scatter.base
    launch = Launch(
        SCATTER_ROWS,
        grid=(row_blocks * column_blocks * outer, 1, 1),
        values={**scatter.sizes, "row_blocks": row_blocks, "column_blocks": column_blocks},
        macros={
            "v_t": METAL.storage[values.dtype.name],
            "b_t": METAL.storage[(base or values).dtype.name],
            "LANES": lanes,
            "COLUMNS": columns,
            "COMBINE": _COMBINE[scatter.how],
            **scatter.macros(METAL),
            "CHUNK": _CHUNK,
        },
        inputs=scatter.arguments,
        flops=scatter.flops,
    )
    return [single_launch(launch, group, lowering)]
