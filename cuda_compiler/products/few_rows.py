"""Lowers products of a few rows by a matrix of numbers, the operand of 16 rows of tensor cores.

A product of so few rows takes as long as its matrix takes to arrive. So nothing lies between memory and the registers
that tensor cores read, and where the matrix has too few rows for all multiprocessors, clusters of blocks share these.
"""

from __future__ import annotations

from functools import lru_cache

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS, TENSOR_CORES
from cuda_compiler.devices import offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import EarlyLaunch
from cuda_compiler.packing import CHUNK
from cuda_compiler.products.few_rows_sizes import WARPS, FewRows, FewRowsCosts, Work, few_rows_candidates
from cuda_compiler.products.vectors import VECTOR_MACROS, vectors_of
from npu_compiler.artifact.plan import CallOption, KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.lowering.candidates import Candidate, Kept, best_candidates
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.problems.forms import Computed
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.templates import KernelTemplate

__all__ = ["FEW_ROWS", "computes_few_rows", "few_rows_options", "is_quicker"]

_MAX_ROWS, _MAX_COMPUTED = 16, 8  # vectors, and those that each block computes
_THREADS = 32 * WARPS
_COMPUTED_BYTES = 80 * 1024  # of shared memory, where each block computes the rows
_KEPT = Kept(close=1.15, most=2)

FEW_ROWS = KernelTemplate(
    "few_rows",
    params="int outputs, tiles, matrix_row, vector_row",
    macros=f"COMMON VECTORS TILES CLUSTER DEPTH RESIDENT MATRIX_CONSTANT HURRIES {VECTOR_MACROS}",
    inputs="matrix vector",
    threads=_THREADS,
    shared_bytes=None,
    files="tensor_cores.cuh streamed_loads.cuh clusters.cuh",
    computed="vector",
)


def computes_few_rows(found: Product, device: DeviceModel) -> bool:
    """Whether each block of the kernel can compute the rows, those of a norm say."""
    ranked, work = ranked_few_rows(found, device), work_of(found)
    if not ranked or work is None or not offers(device, CLUSTERS):
        return False
    return all(each.sizes.shared_bytes(work, 2) <= _COMPUTED_BYTES for each in ranked)


def work_of(found: Product) -> Work | None:
    """A product as this kernel sees it; None where it does not suit."""
    left, right = found.a, found.b
    few = 1 < found.m <= _MAX_ROWS and found.batches == 1 and found.k > 0 and found.n > 0
    is_computed = isinstance(left.operand, Computed)
    few = few and (not is_computed or found.m <= _MAX_COMPUTED)
    if not few or left.dtype not in (FLOAT16, BFLOAT16) or found.k % CHUNK:
        return None
    if not is_computed and (type(left.operand) is not Operand or not left.has_chunks(CHUNK, found.k, True)):
        return None
    if type(right.operand) is not Operand or right.dtype != left.dtype or not right.has_chunks(CHUNK, found.k, True):
        return None
    return Work(found.m, found.n, found.k, is_computed)


def is_quicker(found: Product, in_tiles: float, device: DeviceModel) -> bool:
    """Whether the best candidate should be quicker than tiles, which take so many microseconds once operands are near.

    Args:
        found: A product that the kernel suits.
        in_tiles: What the model of tiles says.
        device: The device.
    """
    pace = device.memory_a_clock * FewRowsCosts.of(device).in_tiles
    arriving = device.microseconds(found.n * found.k * found.b.dtype.size / pace)
    return ranked_few_rows(found, device)[0].microseconds <= max(in_tiles, arriving)


def few_rows_options(found: Product, around: AnchoredGroup) -> list[CallOption]:
    """The launches worth trying, the best first, each for devices with tensor cores or with clusters."""
    return [
        CallOption(each.requires or TENSOR_CORES, (_lower(found, around, each.sizes),))
        for each in ranked_few_rows(found, around.device)
    ]


def ranked_few_rows(found: Product, device: DeviceModel) -> tuple[Candidate[FewRows], ...]:
    """The candidates that are worth timing, the best by the model of their cost first; none where it does not suit."""
    work = work_of(found) if offers(device, TENSOR_CORES) else None
    return () if work is None else _ranked(work, device)


@lru_cache(maxsize=1024)  # a model has the same product in many layers
def _ranked(work: Work, device: DeviceModel) -> tuple[Candidate[FewRows], ...]:
    return best_candidates(few_rows_candidates(work, device), _KEPT)


def _lower(found: Product, around: AnchoredGroup, sizes: FewRows) -> KernelCall:
    work, matrix, vector, device = work_of(found), found.b, found.a, around.device
    assert work is not None
    store = around.pack_size(2)
    blocks = sizes.clusters(work, device) * sizes.cluster
    hurries = matrix.is_constant and blocks <= device.cores
    vectors = vectors_of(vector, around.lowering, _THREADS, blocks)
    launch = EarlyLaunch(
        FEW_ROWS,
        grid=(blocks, 1, 1),
        values={
            "outputs": found.n,
            "tiles": sizes.results(work),
            "matrix_row": matrix.along,
            "vector_row": vector.along,
        },
        macros={
            "vector_t": CUDA.storage[vector.dtype.name],
            "COMMON": found.k,
            "VECTORS": found.m,
            "TILES": sizes.tiles,
            "CLUSTER": sizes.cluster,
            "DEPTH": sizes.depth,
            "RESIDENT": sizes.resident,
            "MATRIX_CONSTANT": int(matrix.is_constant),
            "HURRIES": int(hurries),
            **vectors.macros,
        },
        inputs={"matrix": matrix.argument, **vectors.inputs},
        flops=found.flops,
        prologues=vectors.prologues,
        shared_bytes=sizes.shared_bytes(work, store * around.group.pairs),
        extension=cluster_along_x(sizes.cluster),
        hurries=hurries,
    )
    return around.launch(launch, store)
