"""Lowers products of a few rows by a matrix of numbers or packed codes, the operand of 16 rows of tensor cores.

A product of so few rows takes as long as its matrix takes to arrive. So nothing lies between memory and the registers
that tensor cores read, and where the matrix has too few rows for all multiprocessors, clusters of blocks share these.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from cuda_compiler.anchors import anchor_epilogue, anchor_launch
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS, TENSOR_CORES
from cuda_compiler.devices import offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import EarlyLaunch
from cuda_compiler.packing import pack_size
from cuda_compiler.products.few_rows_sizes import QUAD, WARPS, FewRows, Work, few_rows_candidates, few_rows_costs
from cuda_compiler.products.grouped_matvec import argument_of, part_macros, part_rows, suits_codes
from cuda_compiler.rows import vector_prologue
from npu_compiler.artifact.plan import CallOption, KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16, UINT8
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.candidates import Candidate, Kept, best_candidates
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import Positions
from npu_compiler.lowering.problems.forms import Computed, Dequantised, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate

__all__ = ["FEW_ROWS", "few_rows_options", "is_quicker", "loads_rows", "ranked_few_rows", "suits_few_rows", "work_of"]

_MAX_ROWS, _MAX_COMPUTED_ROWS = 32, 16
_THREADS = 32 * WARPS
_PREFIX = "v"
_COMPUTED_BYTES = 64 * 1024  # of rows that each block computes
_KEPT = Kept(close=1.15, most=2)

FEW_ROWS = KernelTemplate(
    "few_rows",
    params="int outputs, tiles, matrix_row, vector_row, scale_row, zero_row",
    macros=(
        "vector_t scale_t zero_t codebook_t COMMON VECTORS BITS GROUPED GROUP ROW_SCALES ROWS SCALE_GROUP ZERO_GROUP "
        "CODE_KIND FLOAT_MANTISSA FLOAT_SCALE CODEBOOK ZEROS ZERO_BITS ZERO CHUNK WARPS_K TILES CLUSTER DEPTH RESIDENT "
        "MATRIX_CONSTANT HURRIES PROLOGUE VECTOR_PARAMETERS VECTOR_ARGUMENTS? ROW_THREADS?"
    ),
    inputs="matrix scales zeros entries vector",
    threads=_THREADS,
    shared_bytes=None,
    files="tensor_cores.cuh grouped_codes.cuh streamed_loads.cuh clusters.cuh few_rows_stream.cuh",
    computed="vector",
)


def loads_rows(group: Group, position: int, operand: Operand, device: DeviceModel) -> bool:
    """Whether an operand is rows of a product, those of a norm say, that each block of its kernel can compute."""
    problem = group.problem
    if not isinstance(problem, Product) or position != 0 or not isinstance(operand, Computed) or not operand.is_of_rows:
        return False
    found = problem.with_operand(position, operand)
    if not 1 < found.m <= _MAX_COMPUTED_ROWS or not offers(device, CLUSTERS):
        return False
    work = work_of(found)
    if work is None or not _ranked(work, device):
        return False
    return all(each.sizes.shared_bytes(work, 2) <= _COMPUTED_BYTES for each in _ranked(work, device))


def work_of(found: Product) -> Work | None:
    """A product as this kernel sees it; None where it does not suit."""
    left, right = found.a, found.b
    few = 0 < found.m <= _MAX_ROWS and found.batches == 1 and found.k > 0 and found.n > 0
    if not few or (left.k != 1 and not isinstance(left.operand, Computed)) or left.dtype not in (FLOAT16, BFLOAT16):
        return None
    if isinstance(left.operand, Dequantised | GroupedCodes) or isinstance(right.operand, Dequantised):
        return None
    is_computed = isinstance(left.operand, Computed)
    if found.k % 8 or (not is_computed and any(n % 8 for n in left.across(along_k=True))):
        return None
    if isinstance(right.operand, GroupedCodes):
        return _coded_work(found, right.operand, is_computed)
    if type(right.operand) is not Operand or right.dtype != left.dtype or not right.has_chunks(8, found.k, True):
        return None
    return Work(found.m, found.n, found.k, 16, 8, 0, is_computed)


def _coded_work(found: Product, codes: GroupedCodes, is_computed: bool) -> Work | None:
    """The same for codes: chunks of 16 bytes, or of 8 where groups ask for it."""
    known = codes.bits in (4, 8) and suits_codes(codes) and codes.bias is None and 8 % codes.zero_bits == 0
    if not known:
        return None
    whole = codes.group >= found.k
    aligned = gcd(found.b.along, codes.offset, 16)
    for nbytes in (16, 8):
        chunk = nbytes * 8 // codes.bits
        fits = found.k % chunk == 0 and aligned % nbytes == 0
        if fits and (whole or codes.group % (QUAD * chunk) == 0):
            by_row = whole and codes.zeros is None and codes.bits == 8
            span = QUAD * chunk
            group = 0 if by_row else ceil_div(found.k, span) * span if whole else codes.group
            return Work(found.m, found.n, found.k, codes.bits, chunk, group, is_computed)
    return None


def suits_few_rows(found: Product, device: DeviceModel) -> bool:
    """Whether the kernel is worth trying: of one row where tiles of others leave a part of the device idle."""
    ranked = ranked_few_rows(found, device)
    if found.m > 1:
        return bool(ranked)
    idle = ceil_div(found.n, 16) < device.cores
    return bool(ranked) and idle and isinstance(found.b.operand, GroupedCodes) and offers(device, CLUSTERS)


def is_quicker(found: Product, in_tiles: float, device: DeviceModel) -> bool:
    """Whether the best candidate should be quicker than tiles, which take so many microseconds once operands are near.

    Args:
        found: A product that the kernel suits.
        in_tiles: What the model of tiles says.
        device: The device.
    """
    pace = device.memory_a_clock * few_rows_costs(device).in_tiles
    arriving = device.microseconds(found.n * found.k * found.b.dtype.size / pace)
    return ranked_few_rows(found, device)[0].microseconds <= max(in_tiles, arriving)


def few_rows_options(found: Product, group: Group, lowering: Lowering, positions: Positions) -> list[CallOption]:
    """The launches worth trying, the best first, each for devices with tensor cores or with clusters.

    Args:
        found: The product.
        group: What follows it.
        lowering: Where the trace's tensors are.
        positions: The operands of what follows.
    """
    ranked = ranked_few_rows(found, lowering.device)
    return [
        CallOption(each.requires or TENSOR_CORES, (_lower(found, group, lowering, positions, each.sizes),))
        for each in ranked
    ]


def ranked_few_rows(found: Product, device: DeviceModel) -> tuple[Candidate[FewRows], ...]:
    """The candidates that are worth timing, the best by the model of their cost first; none where it does not suit."""
    work = work_of(found) if offers(device, TENSOR_CORES) else None
    return () if work is None else _ranked(work, device)


@lru_cache(maxsize=1024)  # a model has the same product in many layers
def _ranked(work: Work, device: DeviceModel) -> tuple[Candidate[FewRows], ...]:
    candidates = [*few_rows_candidates(work, device)]
    return best_candidates([lambda work, device: candidates], work, device, _KEPT) if candidates else ()


def _lower(found: Product, group: Group, lowering: Lowering, positions: Positions, sizes: FewRows) -> KernelCall:
    work, codes, vector, device = work_of(found), found.b.operand, found.a, lowering.device
    assert work is not None
    grouped = codes if isinstance(codes, GroupedCodes) else None
    computed = vector.operand if isinstance(vector.operand, Computed) else None
    store = min(pack_size(group, positions.operands, group.shape[-1]), 2)
    reads = codes.reads() if grouped else (codes.tensor.index,)
    is_constant = all(lowering.tensors[index].source is None for index in reads)
    blocks = sizes.clusters(work, device) * sizes.cluster
    hurries = is_constant and blocks <= device.cores
    macros: dict[str, object] = {
        **(_number_macros(found) if grouped is None else _code_macros(grouped, found)),
        "vector_t": CUDA.storage[vector.dtype.name],
        "COMMON": found.k,
        "VECTORS": found.m,
        "GROUPED": int(work.group > 0),
        "GROUP": work.group,
        "ROW_SCALES": int(grouped is not None and not work.group),
        "CHUNK": work.chunk,
        "WARPS_K": sizes.warps_k,
        "TILES": sizes.tiles,
        "CLUSTER": sizes.cluster,
        "DEPTH": sizes.depth,
        "RESIDENT": sizes.resident,
        "MATRIX_CONSTANT": int(is_constant),
        "HURRIES": int(hurries),
        "PROLOGUE": int(computed is not None),
        "VECTOR_PARAMETERS": "const vector_t* vector, ",
    }
    rows = {} if grouped is None else part_rows(grouped)
    vector_input, prologues = {"vector": vector.argument}, {}
    if computed is not None:
        prologues, vector_input = {"vector": vector_prologue(computed, lowering, _THREADS, blocks, _PREFIX)}, {}
    launch = EarlyLaunch(
        FEW_ROWS,
        grid=(blocks, 1, 1),
        values={
            "outputs": found.n,
            "tiles": sizes.results(work),
            "matrix_row": found.b.along * (1 if grouped else vector.dtype.size),
            "vector_row": vector.along,
            "scale_row": rows.get("scale_row", 0),
            "zero_row": rows.get("zero_row", 0),
        },
        macros=macros,
        inputs={
            "matrix": codes.argument,
            "scales": codes.argument if grouped is None else grouped.scale.argument,
            "zeros": codes.argument if grouped is None else argument_of(grouped.zeros, grouped),
            "entries": codes.argument if grouped is None else argument_of(grouped.codebook, grouped),
            **vector_input,
        },
        flops=found.flops,
        prologues=prologues,
        shared_bytes=sizes.shared_bytes(work, store * group.pairs),
        extension=cluster_along_x(sizes.cluster),
        hurries=hurries,
    )
    return anchor_launch(launch, anchor_epilogue(group, positions, store), lowering)


def _code_macros(codes: GroupedCodes, found: Product) -> dict[str, object]:
    macros = part_macros(codes, found.a.dtype)
    return {name: value for name, value in macros.items() if name not in ("bias_t", "BIAS_GROUP", "BIASES")}


def _number_macros(found: Product) -> dict[str, object]:
    """The same for a matrix of numbers, to which nothing belongs."""
    nothing = CUDA.storage[UINT8.name]
    zeros = ("SCALE_GROUP", "ZERO_GROUP", "FLOAT_MANTISSA", "CODEBOOK", "ZEROS", "ZERO")
    return {
        "scale_t": CUDA.storage[found.a.dtype.name],
        "zero_t": nothing,
        "codebook_t": nothing,
        "BITS": 16,
        "ROWS": 1,
        "CODE_KIND": "CODES_UNSIGNED",
        "FLOAT_SCALE": "0u",
        "ZERO_BITS": 8,
        **dict.fromkeys(zeros, 0),
    }
