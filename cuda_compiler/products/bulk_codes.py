"""Products of many rows by packed codes, of which idle warps make numbers in memory beside the tiles that read them."""

from __future__ import annotations

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.dialect import CUDA
from cuda_compiler.products.bulk import MATMUL_BULK, BulkForm, lower_bulk, suits_bulk
from cuda_compiler.products.bulk_tilings import PANEL, BulkTiling, bulk_tilings
from cuda_compiler.products.grouped_matvec import part_inputs, part_macros, part_rows
from cuda_compiler.products.product import fits_tiles
from cuda_compiler.tiles.tiling import Asked
from npu_compiler.artifact.plan import Argument, CallOption
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.problems.forms import GroupedCodes
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.templates import KernelTemplate

__all__ = ["MATMUL_BULK_CODES", "bulk_codes_options"]

_COPIERS_REGISTERS = 40  # of a thread that copies or makes numbers

MATMUL_BULK_CODES = KernelTemplate(
    "matmul_bulk_codes",
    params=f"{MATMUL_BULK.params}, outputs, matrix_row, scale_row, zero_row, bias_row",
    macros=(
        f"{MATMUL_BULK.macros} vector_t scale_t zero_t bias_t codebook_t COMMON BITS GROUP ONE_GROUP ROWS SCALE_GROUP "
        "ZERO_GROUP BIAS_GROUP CODE_KIND FLOAT_MANTISSA FLOAT_SCALE CODEBOOK ZEROS ZERO_BITS ZERO BIASES TILES_N "
        "TOGETHER"
    ),
    inputs="matrix scales zeros biases entries numbers a b",
    shared_bytes=None,
    files=f"{MATMUL_BULK.files} grouped_codes.cuh scaled_codes.cuh code_belongings.cuh made_numbers.cuh",
)


def bulk_codes_options(found: Product, made: Product, asked: Asked, around: AnchoredGroup) -> list[CallOption]:
    """The launches worth trying, the best first; none where the copy engine cannot bring the operands.

    Args:
        found: The product of packed codes.
        made: The same by their numbers, in memory that the launch fills.
        asked: What is asked of tiles.
        around: What follows it.
    """
    device, dtype = around.device, found.a.dtype
    if around.group.followers or not fits_tiles(made) or not suits_bulk(made):
        return []
    tilings = (each for each in bulk_tilings(asked, device) if each.splits == each.resident == 1)
    return [
        CallOption(WARPGROUPS, (lower_bulk(made, around, each, dtype, dtype.name, _form(found, made, each, device)),))
        for each in tilings
    ]


def _form(found: Product, made: Product, tiling: BulkTiling, device: DeviceModel) -> BulkForm:
    codes, (tiles_m, tiles_n) = found.b.operand, tiling.tiles(found.m, found.n)
    assert isinstance(codes, GroupedCodes)
    together = ceil_div(tiling.blocks(tiles_m * tiles_n, device), min(tiles_m, PANEL))
    macros = {
        **part_macros(codes, found.a.dtype),
        "vector_t": CUDA.storage[found.a.dtype.name],
        "COMMON": found.k,
        "GROUP": min(codes.group, found.k),
        "ONE_GROUP": 0,
        "TILES_N": tiles_n,
        "TOGETHER": min(tiles_n, together),
        "COPIERS_REGISTERS": _COPIERS_REGISTERS,
    }
    values = {"outputs": found.n, "matrix_row": found.b.along, **part_rows(codes)}
    numbers = Argument(made.b.operand.tensor.index, writes=True)
    return BulkForm(MATMUL_BULK_CODES, values, macros, {**part_inputs(codes), "numbers": numbers})
