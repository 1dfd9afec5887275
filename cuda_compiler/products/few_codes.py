"""Lowers products of 2 to 16 rows by packed codes that come through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cuda_compiler.anchors import AnchoredGroup
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.devices import offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import EarlyLaunch
from cuda_compiler.launches_ahead import Ahead, alone_bytes, launches_ahead, leave_room
from cuda_compiler.products.coded_tiles import BUNDLE, TILE, are_constant, group_of, unit_of
from cuda_compiler.products.few_codes_sizes import FewCodes, Work, few_codes_sizes, held_beside
from cuda_compiler.products.grouped_matvec import MAX_ROWS, computes_rows, part_macros, suits_codes
from cuda_compiler.products.vectors import VECTOR_MACROS, octets_of, vectors_of
from npu_compiler.artifact.plan import CallOption
from npu_compiler.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, UINT8
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.problems.forms import Computed, GroupedCodes
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate

__all__ = ["FEW_CODES", "computes_beside_codes", "few_codes_options"]


_GROUPS, _UNITS = (32, 64, 128), (64, 32)
_ALIGNED = 16  # bytes of a copy
_COPIED = (4, 8, 16)  # bytes that are copied of a bundle's scales
_MAX_COMPUTED = 24 * 1024  # numbers of rows, beyond which blocks compute them for longer than a launch of its own takes
_SPREAD = 4  # blocks of a cluster whose blocks need nothing of each other
_TOLD = "scale_t zero_t codebook_t BITS CODE_KIND FLOAT_MANTISSA FLOAT_SCALE CODEBOOK ZEROS ZERO_BITS ZERO"

FEW_CODES = KernelTemplate(
    "few_codes",
    params="int outputs, tiles, vector_row, zero_row",
    macros=(
        f"{_TOLD} COMMON VECTORS GROUP UNIT ONE_GROUP TEAMS WARPS_K CLUSTER STEP STAGES TURNS IN_PLACE PACED FACTOR "
        f"COLUMNS_SETTLED {VECTOR_MACROS}"
    ),
    inputs="matrix scales zeros entries vector",
    threads=lambda macros: 32 * macros["TEAMS"] * macros["WARPS_K"],
    shared_bytes=None,
    files=(
        "tensor_cores.cuh barriers.cuh clusters.cuh grouped_codes.cuh coded_ring.cuh few_codes_ring.cuh "
        "few_codes_vectors.cuh few_codes_results.cuh"
    ),
    computed="vector",
)


def computes_beside_codes(found: Product, device: DeviceModel) -> bool:
    """Whether each block of a kernel for a few rows can compute those that meet codes, as of a norm.

    Where the kernel for all codes cannot, it reads them from memory, beside this one.
    """
    codes = found.b.operand
    if found.m == 1 or not isinstance(codes, GroupedCodes):
        return False
    few = found.m * found.k <= _MAX_COMPUTED and found.a.dtype == BFLOAT16 and offers(device, CLUSTERS)
    return computes_rows(found) or (few and _unit(found, codes) is not None)


def few_codes_options(found: Product, around: AnchoredGroup) -> list[CallOption]:
    """The launch for devices with as much shared memory as 9.0 has; none where it does not suit."""
    codes, vector, device = found.b.operand, found.a, around.device
    if not isinstance(codes, GroupedCodes) or not offers(device, CLUSTERS):
        return []
    store = around.pack_size(2)
    values = store * around.group.pairs
    work = _work_of(found, codes, around.lowering) if TILE % values == 0 else None
    sizes = None if work is None else few_codes_sizes(work, values, device)
    if work is None or sizes is None:
        return []
    blocks = sizes.blocks(work, device)
    ahead = around.lowering.ask(launches_ahead, codes.tensor.index)
    parts = {"scales": codes.scale, "zeros": codes.zeros or codes, "entries": codes.codebook or codes}
    # float16 may not hold the elements of a row that is yet to be multiplied by its factor
    octets = octets_of(vector, around.lowering, blocks) if vector.dtype == BFLOAT16 else None
    # not around launches that make vectors, which take longer beside blocks of these
    beside = octets is not None or leave_room(ahead)
    streams = octets is not None and codes.bits == 8 and codes.number in (INT8, UINT8)
    sizes, shared_bytes, cluster = _places(sizes, work, values, ahead, streams, device)
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
            "TURNS": sizes.turns(work, device),
            "IN_PLACE": int(sizes.in_place),
            "PACED": int(streams and sizes.in_place),
            "COLUMNS_SETTLED": int(around.columns_are_settled),
            "FACTOR": 0,
            **vectors.macros,
        },
        inputs={"matrix": codes.argument, **{name: part.argument for name, part in parts.items()}, **vectors.inputs},
        flops=found.flops,
        prologues=vectors.prologues,
        shared_bytes=shared_bytes,
        extension=cluster_along_x(cluster, beside=beside),
        hurries=True,
        streams=streams,
    )
    return [CallOption(CLUSTERS, (around.launch(launch, store),))]


def _places(
    sizes: FewCodes, work: Work, values: int, ahead: Sequence[Ahead], streams: bool, device: DeviceModel
) -> tuple[FewCodes, int, int]:
    """How blocks share multiprocessors with others: sizes, shared memory of a block, blocks of a cluster.

    What streams begins beside the launch ahead, and asks for as many codes as there is room for. A launch between two
    of those is small, so that the next one has that room, and in clusters, whose blocks do not share a multiprocessor.
    """
    if streams and ahead and ahead[-1].beside:
        sizes = held_beside(sizes, work, values, ahead[-1].shared_bytes, device)
        if sizes.in_place:
            return sizes, sizes.shared_bytes(work, values), sizes.cluster
    blocks = sizes.blocks(work, device)
    is_between = not work.is_computed and len(ahead) > 1 and ahead[-2].streams and not ahead[-1].streams
    if is_between and sizes.may_be_in_place(work, device) and blocks % _SPREAD == 0:
        sizes = replace(sizes, in_place=True)
        return sizes, sizes.shared_bytes(work, values), _SPREAD
    return sizes, alone_bytes(blocks, sizes.shared_bytes(work, values), device), sizes.cluster


def _work_of(found: Product, codes: GroupedCodes, lowering: Lowering) -> Work | None:
    """A product as the kernel sees it; None where it does not suit."""
    unit, group = _unit(found, codes), group_of(found, codes)
    if unit is None or found.m == 1 or not are_constant(codes, lowering):
        return None
    return Work(
        rows=found.m,
        outputs=found.n,
        k=found.k,
        bits=codes.bits,
        unit=unit,
        group=group,
        scale_bytes=codes.scale.dtype.size,
        zero_bits=0 if codes.zeros is None else codes.zero_bits,
        is_computed=isinstance(found.a.operand, Computed),
    )


def _unit(found: Product, codes: GroupedCodes) -> int | None:
    """Codes of a unit of the kernel; None where it does not take them."""
    if found.m > MAX_ROWS or not suits_codes(codes):
        return None
    unit = unit_of(found, codes, _UNITS)
    return unit if unit is not None and _lies_in_rows(found, codes, group_of(found, codes), unit) else None


def _lies_in_rows(found: Product, codes: GroupedCodes, group: int, unit: int) -> bool:
    """Whether codes of four or eight bits, scales and zero points lie row behind row, in parts that can be copied."""
    scale, zeros, groups = codes.scale, codes.zeros, found.k // group if group else 1
    if codes.bits not in (4, 8) or codes.bias is not None or codes.rows != 1 or (group and group not in _GROUPS):
        return False
    in_rows = found.b.along * 8 == found.k * codes.bits and not codes.offset % _ALIGNED
    scaled = scale.dtype in (FLOAT16, BFLOAT16, FLOAT32) and scale.strides[-1] == groups
    scaled = scaled and (not group or scale.strides[-2] == 1) and not scale.offset * scale.dtype.size % _ALIGNED
    copied = not group or BUNDLE * unit // group * scale.dtype.size in _COPIED
    if zeros is None or not (in_rows and scaled and copied):
        return in_rows and scaled and copied
    if not group or BUNDLE * unit // group * codes.zero_bits % 8:  # a bundle's begin with a byte
        return False
    packed = codes.zero_bits in (4, 8) and zeros.dtype in (INT8, UINT8) and zeros.strides[-2] == 1
    return packed and not zeros.offset % 4 and found.n * zeros.strides[-1] < 1 << 31
