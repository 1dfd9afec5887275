"""Lowers products of a few rows by packed codes that tensor cores multiply as integers, on their way in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_compiler.anchors import anchor_epilogue, anchor_launch
from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.devices import cluster_cores, offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import EarlyLaunch
from cuda_compiler.packing import pack_size
from cuda_compiler.rows import vector_prologue
from npu_compiler.artifact.plan import CallOption
from npu_compiler.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, UINT8
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import Positions
from npu_compiler.lowering.problems.forms import Computed, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate

__all__ = ["INTEGER_ROWS", "IntegerRows", "integer_rows_options"]

_TILE, _BUNDLE = 16, 4
_PREFIX = "v"
FORCE = None
_GROUPS = (32, 64, 128)

INTEGER_ROWS = KernelTemplate(
    "integer_rows",
    params="int outputs, tiles, vector_row, zero_row",
    macros=(
        "vector_t code_t scale_t zero_t COMMON VECTORS BITS GROUP UNIT ONE_GROUP ZEROS ZERO_BITS ZERO BLOCK_WARPS WARPS_K CLUSTER "
        "STEP STAGES RESIDENT HURRIES PROLOGUE VECTOR_PARAMETERS VECTOR_ARGUMENTS? ROW_THREADS?"
    ),
    inputs="matrix scales zeros vector",
    threads=lambda macros: 32 * macros["BLOCK_WARPS"],
    shared_bytes=None,
    files="tensor_cores.cuh code_pairs.cuh warpgroups.cuh clusters.cuh",
    computed="vector",
)


@dataclass(frozen=True)
class IntegerRows:
    """How threads share the work.

    Attributes:
        warps: Of a block.
        warps_k: Those that share a tile.
        cluster: Blocks that share k.
        step: Bundles of a step.
        stages: Steps that each has on their way.
    """

    warps: int
    warps_k: int
    cluster: int
    step: int
    stages: int


@dataclass(frozen=True)
class _Work:
    """A product as the kernel sees it.

    Attributes:
        unit: Codes along k whose sums are integers.
        one_group: Whether scales belong to whole rows.
        computed: Numbers of the vectors that each block computes.
    """

    rows: int
    outputs: int
    k: int
    bits: int
    unit: int
    group: int
    one_group: bool
    scale_bytes: int
    zero_bits: int
    computed: int

    def stage_bytes(self, step: int) -> int:
        """As in integer_rows.cuh."""
        groups = step * _BUNDLE * self.unit // self.group
        scales = self.scale_bytes * (1 if self.one_group else groups)
        zeros = ceil_div(groups * self.zero_bits // 8 + 3, 4) * 4 if self.zero_bits else 0
        return _TILE * (step * _BUNDLE * self.unit * self.bits // 8 + scales + zeros)

    def shared_bytes(self, sizes: IntegerRows, values: int) -> int:
        """As in integer_rows.cuh."""
        bundles = ceil_div(self.k // self.unit // _BUNDLE, sizes.cluster)
        digits = self.rows * (2 * (bundles * _BUNDLE * self.unit + 64) + bundles * 32)
        blocks = ceil_div(max(self.rows, 4), 4)
        parts = 2 * sizes.warps * blocks * 4 * (_TILE + 4) * 4
        share = ceil_div(_TILE // values * self.rows, sizes.cluster)
        if sizes.cluster > 1:
            parts += ceil_div(2 * sizes.warps // sizes.warps_k * sizes.cluster * share * values * 4, 16) * 16
        return sizes.warps * sizes.stages * self.stage_bytes(sizes.step) + digits + parts + 2 * self.computed


def _work_of(found: Product, lowering: Lowering) -> _Work | None:
    """None where it does not suit."""
    codes, vector = found.b.operand, found.a
    if not isinstance(codes, GroupedCodes) or not 0 < found.m <= 16 or found.batches != 1 or found.n % _TILE:
        return None
    computed = isinstance(vector.operand, Computed)
    if not computed and (type(vector.operand) is not Operand or not vector.has_chunks(8, found.k, True)):
        return None
    one_group = codes.group >= found.k
    unit = next((unit for unit in (64, 32) if not found.k % (_BUNDLE * unit) and (one_group or not codes.group % unit)), 0)
    kinds = codes.number in (INT8, UINT8) and codes.codebook is None and codes.bias is None and codes.bits in (4, 8)
    if not unit or not kinds or codes.rows != 1 or not (one_group or codes.group in _GROUPS):
        return None
    groups = 1 if one_group else found.k // codes.group
    scale, zeros = codes.scale, codes.zeros
    plain = found.b.along == found.k * codes.bits // 8 and not codes.offset % 16
    plain = plain and scale.dtype in (FLOAT16, BFLOAT16, FLOAT32) and scale.strides[-1] == groups
    plain = plain and (one_group or scale.strides[-2] == 1) and not scale.offset * scale.dtype.size % 16
    if zeros is not None:
        packed = codes.zero_bits in (4, 8) and zeros.dtype in (INT8, UINT8) and not one_group
        plain = plain and packed and zeros.strides[-2] == 1 and not zeros.offset % 4
    constant = all(lowering.tensors[index].source is None for index in codes.reads())
    scale_bytes = scale.dtype.size
    aligned = one_group or _BUNDLE * unit // codes.group * scale_bytes in (4, 8, 16)
    if not (plain and constant and aligned and codes.zero == int(codes.zero) and abs(codes.zero) <= 256):
        return None
    return _Work(
        found.m,
        found.n,
        found.k,
        codes.bits,
        unit,
        found.k if one_group else codes.group,
        one_group,
        scale_bytes,
        0 if zeros is None else codes.zero_bits,
        found.m * found.k if computed else 0,
    )


def _sizes(work: _Work, values: int, device: DeviceModel) -> IntegerRows | None:
    tiles, bundles = work.outputs // _TILE, work.k // work.unit // _BUNDLE
    step, cluster = 1, 1
    if FORCE is not None:
        found = FORCE(work)
        if found is None:
            return None
        warps, warps_k, budget, step, cluster = (*found, 1)[:5]
    elif tiles <= 2 * device.cores:
        warps = warps_k = min(bundles, 12)
        budget = 110
    else:
        warps, warps_k, budget = 9, 1, 130
    stages = 20
    while stages and work.shared_bytes(IntegerRows(warps, warps_k, cluster, step, stages), values) > budget * 1024:
        stages -= 1
    clusters = min(tiles, cluster_cores(device)[cluster] // cluster if cluster > 1 else device.cores)
    passes = ceil_div(ceil_div(bundles, warps_k * cluster), step) * ceil_div(tiles, clusters * (warps // warps_k))
    return IntegerRows(warps, warps_k, cluster, step, min(stages, passes)) if stages > 0 else None


def integer_rows_options(
    found: Product, group: Group, lowering: Lowering, positions: Positions
) -> list[CallOption]:
    """The launch for devices with enough shared memory; none where it does not suit.

    Args:
        found: The product.
        group: What follows it.
        lowering: Where the trace's tensors are.
        positions: The operands of what follows.
    """
    codes, vector, device = found.b.operand, found.a, lowering.device
    store = min(pack_size(group, positions.operands, group.shape[-1]), 2)
    work = _work_of(found, lowering) if offers(device, CLUSTERS) else None
    sizes = None if work is None else _sizes(work, store * group.pairs, device)
    if work is None or sizes is None:
        return []
    assert isinstance(codes, GroupedCodes)
    computed = vector.operand if isinstance(vector.operand, Computed) else None
    tiles = work.outputs // _TILE
    held = device.cores if sizes.cluster == 1 else cluster_cores(device)[sizes.cluster]
    blocks = min(tiles, held // sizes.cluster) * sizes.cluster
    zeros = codes.argument if codes.zeros is None else codes.zeros.argument
    inputs, prologues = {"matrix": codes.argument, "scales": codes.scale.argument, "zeros": zeros}, {}
    if computed is None:
        inputs["vector"] = vector.argument
    else:
        prologues["vector"] = vector_prologue(computed, lowering, 32 * sizes.warps, blocks, _PREFIX)
    launch = EarlyLaunch(
        INTEGER_ROWS,
        grid=(blocks, 1, 1),
        values={
            "outputs": found.n,
            "tiles": tiles,
            "vector_row": vector.along,
            "zero_row": 0 if codes.zeros is None else codes.zeros.strides[-1],
        },
        macros={
            "vector_t": CUDA.storage[vector.dtype.name],
            "code_t": CUDA.storage[codes.number.name],
            "scale_t": CUDA.storage[codes.scale.dtype.name],
            "zero_t": CUDA.storage[(UINT8 if codes.zeros is None else codes.zeros.dtype).name],
            "COMMON": found.k,
            "VECTORS": found.m,
            "BITS": codes.bits,
            "GROUP": work.group,
            "UNIT": work.unit,
            "ONE_GROUP": int(work.one_group),
            "ZEROS": int(codes.zeros is not None),
            "ZERO_BITS": codes.zero_bits,
            "ZERO": int(codes.zero),
            "BLOCK_WARPS": sizes.warps,
            "WARPS_K": sizes.warps_k,
            "CLUSTER": sizes.cluster,
            "STEP": sizes.step,
            "STAGES": sizes.stages,
            "RESIDENT": 1,
            "HURRIES": 1,
            "PROLOGUE": int(computed is not None),
            "VECTOR_PARAMETERS": "const vector_t* vector, ",
        },
        inputs=inputs,
        flops=found.flops,
        prologues=prologues,
        shared_bytes=work.shared_bytes(sizes, store * group.pairs),
        extension=cluster_along_x(sizes.cluster),
        hurries=True,
    )
    call = anchor_launch(launch, anchor_epilogue(group, positions, store), lowering)
    return [CallOption(CLUSTERS, (call,))]
