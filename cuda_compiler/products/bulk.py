"""Products of many rows by the copy engine and warpgroups of compute capability 9.0."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.extensions import TensorMap
from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.devices import offers
from cuda_compiler.products.bulk_tilings import BulkCosts, BulkTiling, bulk_tilings
from cuda_compiler.products.coded_rows import suits_coded_rows
from cuda_compiler.products.product import are_along_k, fits_tiles
from cuda_compiler.products.row_followers import stored_together, stores_followers
from cuda_compiler.tiles.tiling import Asked
from cuda_compiler.tiles.wgmma import LINE, warpgroup_product
from npu_compiler.artifact.plan import Argument, CallOption, KernelCall
from npu_compiler.dtypes import BFLOAT16, DType
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import GroupedCodes, Unscaled
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["MATMUL_BULK", "bulk_options", "bulk_values", "loads_unscaled", "lower_bulk", "rows_argument", "suits_bulk"]

_ROWS = 9  # fewer are for kernels of few rows, or of threads that copy
_FEW_ROWS = 16  # the most that those kernels take
_GROUP = 32  # columns whose lines are ordered together

MATMUL_BULK = KernelTemplate(
    "matmul_bulk",
    params="int m, n, k, tiles_m, tiles_n",
    macros="TILE_M TILE_N COPIED_ROWS STAGES TURNS SPLITS PANEL RESIDENT WHOLE_ROWS WHOLE_COLUMNS B_CONSTANT",
    inputs="a b",
    shared_bytes=None,
    files=(
        "tensor_cores.cuh warpgroups.cuh barriers.cuh ring.cuh clusters.cuh copy_engine.cuh "
        "bulk_tile.cuh bulk_store.cuh"
    ),
)


def loads_unscaled(group: Group, position: int, operand: Operand, device: DeviceModel) -> bool:
    """Whether rows are multiplied by their factors in an epilogue, and what these are made of is stored in another one.

    So it is for as many rows as the device's data say; and for bfloat16, as rows without their factors may be beyond
    the largest float16.
    """
    if not isinstance(operand, Unscaled) or operand.dtype != BFLOAT16 or not offers(device, WARPGROUPS):
        return False
    most = BulkCosts.of(device).factored_rows
    products = [problem for problem in (group.problem, operand.made.problem) if isinstance(problem, Product)]
    return len(products) == 2 and all(_takes_factors(each) and _FEW_ROWS < each.m <= most for each in products)


def _takes_factors(found: Product) -> bool:
    """Whether there are launches of a product whose epilogues do so, of numbers or of packed codes."""
    if isinstance(found.b.operand, GroupedCodes):
        return type(found.a.operand) is Operand and suits_coded_rows(found)
    return found.is_stored and fits_tiles(found) and suits_bulk(found)


def bulk_options(found: Product, asked: Asked, around: AnchoredGroup) -> list[CallOption]:
    """The ways to compute a product that are worth trying, the best first; none where the copy engine cannot."""
    if not fits_tiles(found) or not suits_bulk(found):
        return []
    if not stores_followers(around):
        return []
    kind = found.a.dtype
    return [
        CallOption(WARPGROUPS, (lower_bulk(found, around, tiling, kind, kind.name),))
        for tiling in bulk_tilings(asked, around.device)
    ]


def suits_bulk(found: Product) -> bool:
    """Whether the copy engine brings the operands, if they are read 16 bytes at a time."""
    whole = are_along_k(found) and found.batches == 1
    return whole and found.m >= _ROWS and found.n % _GROUP == 0 and min(found.a.along, found.b.along) > 0


def lower_bulk(found: Product, around: AnchoredGroup, tiling: BulkTiling, unit: DType, multiplied: str) -> KernelCall:
    """The launch of one tiling.

    Args:
        found: The product, in elements of 16 bits.
        around: What follows it.
        tiling: The tiling.
        unit: A data type of such elements.
        multiplied: What tensor cores see in them, see `warpgroup_product`.
    """
    tiles_m, tiles_n = tiling.tiles(found.m, found.n)
    launch = Launch(
        MATMUL_BULK,
        grid=(tiling.blocks(tiles_m * tiles_n, around.device), tiling.splits, 1),
        values=bulk_values(found, tiling),
        macros={**tiling.macros(found.m, found.n), "B_CONSTANT": int(found.b.is_constant)},
        inputs={"a": rows_argument(found, tiling, unit), "b": _columns_argument(found, tiling, unit)},
        flops=2 * prod(found.shape) * found.a.operand.shape[-1],
        text=warpgroup_product(tiling.group_columns, multiplied),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes(found.m),
    )
    return around.launch(launch, stored_together(around))


def bulk_values(found: Product, tiling: BulkTiling) -> dict[str, int]:
    """The sizes that kernels of such tiles have as parameters."""
    tiles_m, tiles_n = tiling.tiles(found.m, found.n)
    return {"m": found.m, "n": found.n, "k": found.k, "tiles_m": tiles_m, "tiles_n": tiles_n}


def rows_argument(found: Product, tiling: BulkTiling, unit: DType) -> Argument:
    """How the copy engine sees the left matrix."""
    a, row = found.a, found.a.along * unit.size
    box = LINE, tiling.copied_rows(found.m)
    return replace(a.argument, extension=TensorMap(unit, (found.k, found.m), (row,), box))


def _columns_argument(found: Product, tiling: BulkTiling, unit: DType) -> Argument:
    """The lines of `b` in groups of 32, ordered so that a thread's results, 2 of every 8 columns, are neighbours.

    Line ``8 * block + 2 * thread + i`` of a group in shared memory is line ``8 * thread + 2 * block + i`` of `b`.
    """
    b, row = found.b, found.b.along * unit.size
    sizes = found.k, 2, 4, 4, found.n // _GROUP
    strides = row, 8 * row, 2 * row, _GROUP * row
    box = LINE, 2, 4, 4, tiling.columns // _GROUP
    return replace(b.argument, extension=TensorMap(unit, sizes, strides, box))
