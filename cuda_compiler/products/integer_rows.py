"""Lowers products of one row by packed codes that tensor cores multiply as integers."""

from __future__ import annotations

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.devices import offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import EarlyLaunch
from cuda_compiler.launches_ahead import launches_ahead, leave_room, paced_blocks, spread_bytes
from cuda_compiler.products.coded_tiles import TILE, are_constant, group_of, unit_of
from cuda_compiler.products.integer_rows_sizes import Work, integer_rows_sizes
from cuda_compiler.products.vectors import VECTOR_MACROS, octets_of, vectors_of
from npu_compiler.artifact.plan import CallOption
from npu_compiler.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, UINT8
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.problems.forms import Computed, GroupedCodes
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate

__all__ = ["INTEGER_ROWS", "integer_rows_options"]

_GROUPS, _UNITS = (32, 64, 128), (64, 32)
_ALIGNED = 16  # bytes of a copy
_MOST_ZERO = 256

INTEGER_ROWS = KernelTemplate(
    "integer_rows",
    params="int tiles",
    macros=(
        "code_t scale_t zero_t COMMON BITS GROUP UNIT ONE_GROUP ZEROS ZERO_BITS ZERO_ROW ZERO "
        f"TEAMS WARPS_K STEP STAGES SCALED_TILES HELD PACED FACTOR COLUMNS_SETTLED {VECTOR_MACROS}"
    ),
    inputs="matrix scales zeros vector",
    threads=lambda macros: 32 * macros["TEAMS"] * macros["WARPS_K"],
    shared_bytes=None,
    files="tensor_cores.cuh barriers.cuh code_pairs.cuh coded_ring.cuh integer_rows_codes.cuh integer_rows_vectors.cuh",
    computed="vector",
)


def integer_rows_options(found: Product, around: AnchoredGroup) -> list[CallOption]:
    """The launch for devices with as much shared memory as 9.0 has; none where it does not suit."""
    codes, vector, device = found.b.operand, found.a, around.device
    if not isinstance(codes, GroupedCodes) or not offers(device, CLUSTERS):
        return []
    store = around.pack_size(2)
    work = _work_of(found, codes, around.lowering) if TILE % (store * around.group.pairs) == 0 else None
    sizes = None if work is None else integer_rows_sizes(work, device)
    if work is None or sizes is None:
        return []
    blocks, shared_bytes = sizes.blocks(work, device), sizes.shared_bytes(work, device)
    ahead = around.lowering.ask(launches_ahead, codes.tensor.index)
    parts = {"matrix": codes, "scales": codes.scale, "zeros": codes.zeros or codes}
    octets = octets_of(vector, around.lowering, blocks)
    vectors = octets or vectors_of(vector, around.lowering, 32 * sizes.warps, blocks)
    launch = EarlyLaunch(
        INTEGER_ROWS,
        grid=(blocks, 1, 1),
        values={"tiles": work.tiles},
        macros={
            "vector_t": CUDA.storage[vector.dtype.name],
            "code_t": CUDA.storage[codes.number.name],
            "scale_t": CUDA.storage[codes.scale.dtype.name],
            "zero_t": CUDA.storage[(UINT8 if codes.zeros is None else codes.zeros.dtype).name],
            "COMMON": found.k,
            "BITS": codes.bits,
            "GROUP": work.group or found.k,
            "UNIT": work.unit,
            "ONE_GROUP": int(not work.group),
            "ZEROS": int(codes.zeros is not None),
            "ZERO_BITS": codes.zero_bits,
            "ZERO_ROW": work.zero_row,
            "ZERO": int(codes.zero),
            "TEAMS": sizes.teams,
            "WARPS_K": sizes.warps_k,
            "STEP": work.step,
            "STAGES": sizes.stages,
            "SCALED_TILES": sizes.scaled_tiles(work, device),
            "HELD": int(sizes.holds_tile(work, device)),
            "PACED": paced_blocks(ahead, blocks, shared_bytes, device) if sizes.stages > 1 else 0,
            "FACTOR": 0,
            "COLUMNS_SETTLED": int(around.columns_are_settled),
            **vectors.macros,
        },
        inputs={**{name: part.argument for name, part in parts.items()}, **vectors.inputs},
        flops=found.flops,
        prologues=vectors.prologues,
        shared_bytes=spread_bytes(ahead, shared_bytes, device),
        extension=cluster_along_x(1, beside=sizes.beside or codes.bits == 4 or leave_room(ahead)),
        hurries=True,
    )
    return [CallOption(CLUSTERS, (around.launch(launch, store),))]


def _work_of(found: Product, codes: GroupedCodes, lowering: Lowering) -> Work | None:
    """A product as the kernel sees it; None where it does not suit."""
    vector, group = found.a, group_of(found, codes)
    unit = unit_of(found, codes, _UNITS) if found.m == 1 and are_constant(codes, lowering) else None
    if unit is None or not _suits(found, codes, group):
        return None
    return Work(
        outputs=found.n,
        k=found.k,
        bits=codes.bits,
        unit=unit,
        group=group,
        scale_bytes=codes.scale.dtype.size,
        zero_bits=0 if codes.zeros is None else codes.zero_bits,
        computed=found.k if isinstance(vector.operand, Computed) and octets_of(vector, lowering, 1) is None else 0,
    )


def _suits(found: Product, codes: GroupedCodes, group: int) -> bool:
    """Whether codes are integers, and they and what belongs to them lie as the kernel copies them: row behind row."""
    scale, zeros, groups = codes.scale, codes.zeros, found.k // group if group else 1
    integers = codes.number in (INT8, UINT8) and codes.bits in (4, 8) and codes.codebook is None and codes.bias is None
    if not integers or codes.rows != 1 or (group and group not in _GROUPS):
        return False
    in_rows = found.b.along * 8 == found.k * codes.bits and not codes.offset % _ALIGNED
    scaled = scale.dtype in (FLOAT16, BFLOAT16, FLOAT32) and scale.strides[-1] == groups
    scaled = scaled and (not group or scale.strides[-2] == 1) and not scale.offset * scale.dtype.size % _ALIGNED
    if not (in_rows and scaled):
        return False
    if zeros is None:
        return codes.zero == int(codes.zero) and abs(codes.zero) <= _MOST_ZERO
    packed = codes.zero_bits in (4, 8) and zeros.dtype in (INT8, UINT8) and zeros.strides[-2] == 1
    in_rows = zeros.strides[-1] == ceil_div(groups * codes.zero_bits, 8) and not zeros.offset % _ALIGNED
    return bool(group) and packed and in_rows
