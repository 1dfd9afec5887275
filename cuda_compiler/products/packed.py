"""Products of many rows by packed codes: numbers are made while a tile is brought, or ahead of the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from cuda_compiler.anchors import anchor_launch
from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.dialect import CUDA
from cuda_compiler.maps import lower_elementwise
from cuda_compiler.products.bulk import MATMUL_BULK, bulk_epilogue, bulk_values, rows_argument, suits_bulk
from cuda_compiler.products.bulk_tilings import BulkTiling, bulk_candidates, bulk_clocks, bulk_costs
from cuda_compiler.products.coded_rows import coded_rows_options, suits_coded_rows
from cuda_compiler.products.grouped_matvec import (
    part_inputs,
    part_macros,
    part_rows,
    suits_codes,
)
from cuda_compiler.products.product import are_along_k
from cuda_compiler.tiles.lowering import bytes_of_a_result
from cuda_compiler.tiles.tiling import Asked
from cuda_compiler.tiles.wgmma import warpgroup_product
from npu_compiler.artifact.plan import CallOption, KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.lowering.anchors import Epilogue
from npu_compiler.lowering.candidates import Candidate, Kept, best_candidates
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import in_memory_order
from npu_compiler.lowering.positions import Positions
from npu_compiler.lowering.problems.forms import Dequantised, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch
from npu_compiler.tensor.expr import Ref
from npu_compiler.tensor.layout import Layout
from npu_compiler.tensor.trace import Map, TracedTensor

__all__ = ["MATMUL_PACKED", "loads_packed", "packed_options"]

_KEPT = Kept(close=1.1, most=2)
_LEAST_ROWS = 65  # for fewer, making the numbers takes longer than what they are read for
_UNIT, _ACCESS = 32, 16  # codes that a thread has of a line, and bytes that it loads at a time

MATMUL_PACKED = KernelTemplate(
    "matmul_packed",
    params=f"{MATMUL_BULK.params}, matrix_row, scale_row, zero_row, bias_row",
    macros=(
        "TILE_M TILE_N COPIED_ROWS STAGES TURNS SPLITS PANEL vector_t scale_t zero_t bias_t codebook_t BITS GROUP ROWS "
        "SCALE_GROUP ZERO_GROUP BIAS_GROUP CODE_KIND FLOAT_MANTISSA FLOAT_SCALE CODEBOOK ZEROS ZERO_BITS ZERO BIASES"
    ),
    inputs="a matrix scales zeros biases entries",
    shared_bytes=None,
    files=(
        "tensor_cores.cuh grouped_codes.cuh scaled_codes.cuh warpgroups.cuh copy_engine.cuh bulk_copies.cuh "
        "bulk_tile.cuh bulk_store.cuh"
    ),
)


def loads_packed(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is packed codes that are made into numbers on their way into a product of many rows."""
    problem = group.problem
    if not isinstance(operand, GroupedCodes) or not isinstance(problem, Product) or position != 1:
        return False
    left = problem.a
    if isinstance(left.operand, Dequantised | GroupedCodes) or left.dtype not in (FLOAT16, BFLOAT16):
        return False
    found = problem.with_operand(position, operand)
    many = suits_coded_rows(found) or (found.m >= _LEAST_ROWS and suits_bulk(found))
    in_lines = are_along_k(found) and left.has_chunks(8, found.k, True)
    whole = operand.group >= found.k or operand.group % _UNIT == 0
    aligned = not any(number % _ACCESS for number in (found.b.along, operand.offset))
    fits = operand.bits in (4, 8) and 8 % operand.zero_bits == 0 and found.k % _UNIT == 0 and whole and aligned
    constant = operand.is_constant and all(part.is_constant for part in operand.parts)
    return many and in_lines and fits and constant and suits_codes(operand)


def packed_options(
    found: Product,
    group: Group,
    lowering: Lowering,
    positions: Positions,
    others: Callable[[Product], list[CallOption]],
) -> list[CallOption]:
    """The launches worth trying.

    Args:
        found: The product.
        group: What follows it.
        lowering: Where the trace's tensors are.
        positions: The operands of what follows.
        others: The options of the same product of numbers in memory, the last one for any device.
    """
    few = coded_rows_options(found, group, lowering, positions)
    made, calls = _numbers_ahead(found, lowering)
    ahead = [replace(option, calls=(*calls, *option.calls)) for option in others(made)]
    if few:
        return [*few, *ahead]
    fused = bulk_epilogue(group, positions)
    asked = Asked(found.m, found.n, found.k, 1, bytes_of_a_result(found, group, lowering))
    ranked = packed_tilings(asked, _code_bytes(found), lowering.device)
    options = [CallOption(WARPGROUPS, (_lower(found, fused, lowering, tiling),)) for tiling in ranked.tilings]
    return [*options, *ahead] if ranked.are_best else [*ahead[:1], *options, *ahead[1:]]


def _code_bytes(found: Product) -> float:
    """Of a code of the right matrix."""
    assert isinstance(found.b.operand, GroupedCodes)
    return found.b.operand.bits / 8


@dataclass(frozen=True)
class PackedCosts:
    """What decides whether numbers are made while tiles are brought.

    Attributes:
        step, column: Clocks that a step along k takes the threads that make numbers: at the least, and for each column.
        made_ahead: The part of the memory's bandwidth that a kernel has which makes numbers ahead of the product.
    """

    step: float
    column: float
    made_ahead: float


@dataclass(frozen=True)
class RankedTilings:
    """Tilings worth timing, and whether they should be quicker than numbers that are made ahead.

    Attributes:
        tilings: The best first; none where the device lacks the instructions.
        are_best: By the models of their cost.
    """

    tilings: tuple[BulkTiling, ...]
    are_best: bool


@lru_cache(maxsize=1024)
def packed_tilings(asked: Asked, code_bytes: float, device: DeviceModel) -> RankedTilings:
    """Tilings of which no two blocks share a tile.

    Args:
        asked: The product.
        code_bytes: Bytes of a code.
        device: The device.
    """

    def candidates(asked: Asked, device: DeviceModel) -> Iterator[Candidate[BulkTiling]]:
        for found in bulk_candidates(asked, device):
            if found.sizes.splits == 1:
                least = costs.step + costs.column * found.sizes.columns
                clocks = bulk_clocks(found.sizes, bulk_costs(device), asked, device, least)
                yield replace(found, microseconds=device.microseconds(clocks))

    plain = [found.microseconds for found in bulk_candidates(asked, device)]
    if not plain:
        return RankedTilings((), False)
    costs = device.constants("packed_tiles", PackedCosts)
    best = best_candidates([candidates], asked, device, _KEPT)
    moved = asked.n * asked.k * (code_bytes + 2)
    ahead = device.microseconds(moved / (device.memory_a_clock * costs.made_ahead))
    return RankedTilings(tuple(found.sizes for found in best), best[0].microseconds <= min(plain) + ahead)


def _lower(found: Product, fused: Epilogue, lowering: Lowering, tiling: BulkTiling) -> KernelCall:
    codes = found.b.operand
    assert isinstance(codes, GroupedCodes)
    values = bulk_values(found, tiling)
    launch = Launch(
        MATMUL_PACKED,
        grid=(tiling.blocks(values["tiles_m"] * values["tiles_n"], lowering.device), 1, 1),
        values={**values, "matrix_row": found.b.along, **part_rows(codes)},
        macros={
            **tiling.macros(found.m),
            **part_macros(codes, found.a.dtype),
            "GROUP": codes.group,
            "vector_t": CUDA.storage[found.a.dtype.name],
        },
        inputs={
            "a": rows_argument(found, tiling, found.a.dtype),
            **part_inputs(codes),
        },
        flops=found.flops,
        text=warpgroup_product(tiling.group_columns, found.a.dtype.name),
        block=(tiling.threads, 1, 1),
        shared_bytes=tiling.shared_bytes,
    )
    return anchor_launch(launch, fused, lowering)


def _numbers_ahead(found: Product, lowering: Lowering) -> tuple[Product, list[KernelCall]]:
    """The product of numbers that a launch of its own has made, and that launch."""
    codes, dtype = found.b.operand, found.a.dtype
    assert isinstance(codes, GroupedCodes)
    shape = codes.shape
    place = lowering.scratch(found.n * found.k * dtype.size)
    order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    layout = Layout(shape, shape, order)
    tensor = TracedTensor(place, codes.tensor.name, shape, dtype, layout, "plain", Map(codes.expr))
    work = Group(tensor, None, codes.expr, shape, tensor.view, (f"numbers of {codes.tensor.name}",))
    calls = lower_elementwise(in_memory_order(work), lowering)
    return found.with_operand(1, Operand(tensor, Ref(place, tensor.view))), [*calls]
