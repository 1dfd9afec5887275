"""Lowers products of groups of rows: tiles of one group each, on tensor cores or by plain arithmetic."""

from __future__ import annotations

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import CHUNK
from cuda_compiler.tiles.tiling import TILING_MACROS, Asked, Tiling
from cuda_compiler.tiles.warps import warp_candidates
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.grouped_product import GroupedProduct
from npu_compiler.lowering.problems.operand import Operand, are_chunks
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["GROUPED_MATMUL", "GROUPED_MATMUL_PLAIN", "lower_grouped"]

_PARAMS = "int m, n, k, groups, a_row, a_k, b_group, b_k, b_col, end_step, tiles_n"
_PLAIN_SIDE = 32


GROUPED_MATMUL = KernelTemplate(
    "grouped_matmul",
    params=_PARAMS,
    macros=f"{TILING_MACROS} tile_t end_t A_ALONG_K B_ALONG_K B_CONSTANT",
    inputs="a b ends partial",
    shared_bytes=None,
)
GROUPED_MATMUL_PLAIN = KernelTemplate(
    "grouped_matmul_plain",
    params=_PARAMS,
    macros="a_t end_t B_ALONG_K",
    inputs="a b ends",
    threads=256,
    before="grouped_rows.cuh",
)


@lowering_of(GroupedProduct)
def lower_grouped(found: GroupedProduct, group: Group, lowering: Lowering) -> list[KernelCall]:
    """One launch, of as many tiles as groups of any sizes may need.

    Raises:
        OpRefusal: A tensor that the epilogue reads is too large.
    """
    around = AnchoredGroup.of(group, lowering)
    tiling = _tiling(found, lowering)
    side, columns = (_PLAIN_SIDE, _PLAIN_SIDE) if tiling is None else (tiling.rows, tiling.columns)
    tiles_n = ceil_div(found.n, columns)
    tiles = min(found.m, ceil_div(found.m, side) + found.groups) * tiles_n
    macros: dict[str, object] = {
        "end_t": CUDA.storage[found.ends.dtype.name],
        "B_ALONG_K": int(found.matrices.strides[1] == 1),
    }
    inputs = {"a": found.rows.argument, "b": found.matrices.argument, "ends": found.ends.argument}
    values = {**found.values(), "tiles_n": tiles_n}
    if tiling is None:
        macros["a_t"] = CUDA.storage[found.rows.dtype.name]
        launch = Launch(GROUPED_MATMUL_PLAIN, (tiles, 1, 1), values, macros, inputs, flops=found.flops)
        return [around.launch(launch, 1)]
    macros |= {
        **tiling.macros(tiles, ceil_div(found.k, tiling.depth)),
        "tile_t": CUDA.storage[found.rows.dtype.name],
        "A_ALONG_K": 1,
        "B_CONSTANT": 0,
    }
    launch = Launch(
        GROUPED_MATMUL,
        grid=(tiles, 1, 1),
        values=values,
        macros=macros,
        inputs={**inputs, "partial": found.rows.argument},
        flops=found.flops,
        files=(*(file for file in tiling.files if file != "tile_once.cuh"), "grouped_rows.cuh"),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
    )
    return [around.launch(launch, around.pack_size())]


def _tiling(found: GroupedProduct, lowering: Lowering) -> Tiling | None:
    """The tiles that any device multiplies, each by one block; None where operands are not read 16 bytes at a time."""
    dtype = found.rows.dtype
    if dtype not in (FLOAT16, BFLOAT16) or dtype != found.matrices.dtype or not found.rows.has_chunks(CHUNK):
        return None
    if not _has_chunks(found.matrices):
        return None
    asked = Asked(max(1, found.m // found.groups), found.n, found.k, found.groups)
    candidates = [each for each in warp_candidates(asked, lowering.device) if each.sizes.splits == 1]
    return min(candidates, key=lambda each: each.microseconds).sizes


def _has_chunks(matrices: Operand) -> bool:
    """Whether 16 bytes at a time can be read of each matrix, along k or along its columns."""
    along = 1 if matrices.strides[1] == 1 else 2
    return are_chunks(CHUNK, matrices.strides[along], (*matrices.across(along), matrices.shape[along]))
