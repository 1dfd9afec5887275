"""Lowers products of 2 to 16 rows by packed codes that come through shared memory."""

from __future__ import annotations

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.devices import offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import EarlyLaunch
from cuda_compiler.octets import octet_prologue
from cuda_compiler.packing import CHUNK
from cuda_compiler.products.code_layout import group_of, is_constant, lies_in_rows, unit_of
from cuda_compiler.products.few_codes_sizes import few_codes_sizes
from cuda_compiler.products.grouped_matvec import MAX_ROWS, part_macros, suits_codes
from cuda_compiler.products.integer_rows_sizes import TILE, Work
from cuda_compiler.products.vectors import VECTOR_MACROS, Vectors, vectors_of
from npu_compiler.artifact.plan import CallOption
from npu_compiler.dtypes import BFLOAT16
from npu_compiler.lowering.problems.forms import Computed, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Matrix, Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate

__all__ = ["FEW_CODES", "few_codes_options"]


_TOLD = "scale_t zero_t codebook_t BITS CODE_KIND FLOAT_MANTISSA FLOAT_SCALE CODEBOOK ZEROS ZERO_BITS ZERO"

FEW_CODES = KernelTemplate(
    "few_codes",
    params="int outputs, tiles, vector_row, zero_row",
    macros=(
        f"{_TOLD} COMMON VECTORS GROUP UNIT ONE_GROUP TEAMS WARPS_K CLUSTER STEP STAGES EARLY FACTOR {VECTOR_MACROS}"
    ),
    inputs="matrix scales zeros entries vector",
    threads=lambda macros: 32 * macros["TEAMS"] * macros["WARPS_K"],
    shared_bytes=None,
    files="tensor_cores.cuh barriers.cuh clusters.cuh grouped_codes.cuh few_codes_ring.cuh",
    computed="vector",
)


def few_codes_options(found: Product, around: AnchoredGroup) -> list[CallOption]:
    """The launch for devices with as much shared memory as 9.0 has; none where it does not suit."""
    codes, vector, device = found.b.operand, found.a, around.device
    if not isinstance(codes, GroupedCodes) or not offers(device, CLUSTERS):
        return []
    store = around.pack_size(2)
    work = _work_of(found, codes, around.lowering) if TILE % (store * around.group.pairs) == 0 else None
    sizes = None if work is None else few_codes_sizes(work, found.m, store * around.group.pairs, device)
    if work is None or sizes is None:
        return []
    blocks = sizes.clusters(work, device) * sizes.cluster
    parts = {"scales": codes.scale, "zeros": codes.zeros or codes, "entries": codes.codebook or codes}
    octets = _octets(vector, around.lowering, blocks)
    vectors = octets or vectors_of(vector, around.lowering, 32 * sizes.warps, blocks)
    told = part_macros(codes, vector.dtype)
    launch = EarlyLaunch(
        FEW_CODES,
        grid=(blocks, 1, 1),
        values={
            "outputs": found.n,
            "tiles": work.tiles,
            "vector_row": vector.along,
            "zero_row": 0 if codes.zeros is None else codes.zeros.strides[-1],
        },
        macros={
            **{name: told[name] for name in _TOLD.split()},
            "vector_t": CUDA.storage[vector.dtype.name],
            "COMMON": found.k,
            "VECTORS": found.m,
            "GROUP": work.group or found.k,
            "UNIT": work.unit,
            "ONE_GROUP": int(not work.group),
            "TEAMS": sizes.teams,
            "WARPS_K": sizes.warps_k,
            "CLUSTER": sizes.cluster,
            "STEP": work.step,
            "STAGES": sizes.stages,
            "EARLY": sizes.early or sizes.stages,
            **vectors.macros,
            **({"PROLOGUE": 2} if octets else {"FACTOR": 0}),
        },
        inputs={"matrix": codes.argument, **{name: part.argument for name, part in parts.items()}, **vectors.inputs},
        flops=found.flops,
        prologues=vectors.prologues,
        shared_bytes=sizes.shared_bytes(work, found.m, store * around.group.pairs),
        extension=cluster_along_x(sizes.cluster),
        hurries=True,
    )
    return [CallOption(CLUSTERS, (around.launch(launch, store),))]


def _work_of(found: Product, codes: GroupedCodes, lowering: Lowering) -> Work | None:
    """A product as the kernel sees it; None where it does not suit."""
    vector, unit = found.a, unit_of(found, codes)
    if not 1 < found.m <= MAX_ROWS or found.batches != 1 or found.n % TILE:
        return None
    is_computed = isinstance(vector.operand, Computed)
    if not is_computed and (type(vector.operand) is not Operand or not vector.has_chunks(CHUNK, found.k, True)):
        return None
    if unit is None or not is_constant(codes, lowering):
        return None
    if not suits_codes(codes) or not lies_in_rows(found, codes, unit):
        return None
    return Work(
        outputs=found.n,
        k=found.k,
        bits=codes.bits,
        unit=unit,
        group=group_of(found, codes),
        scale_bytes=codes.scale.dtype.size,
        zero_bits=0 if codes.zeros is None else codes.zero_bits,
        computed=found.k if is_computed else 0,
    )


def _octets(vector: Matrix, lowering: Lowering, blocks: int) -> Vectors | None:
    """The vectors as what threads compute eight neighbours of by themselves, where their rows allow that.

    What is yet to be multiplied by its row's factor has the range of bfloat16, but not of float16.
    """
    if not isinstance(vector.operand, Computed) or vector.dtype != BFLOAT16:
        return None
    prologue = octet_prologue(vector.operand, lowering, blocks)
    return None if prologue is None else Vectors({}, {"vector": prologue})
