"""Products of 17 to 64 rows by packed codes, which are read once and made into numbers in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from cuda_compiler.anchors import anchor_epilogue, anchor_launch
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS, TENSOR_CORES
from cuda_compiler.devices import cluster_cores, offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import pack_size
from cuda_compiler.products.grouped_matvec import MAX_ROWS, argument_of, part_macros, part_rows
from npu_compiler.artifact.plan import CallOption, KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.candidates import Candidate, Kept, best_candidates
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import Positions
from npu_compiler.lowering.problems.forms import GroupedCodes
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["CODED_ROWS", "coded_rows_options", "suits_coded_rows"]

_MAX_ROWS = 64
_FAMILY = "coded_rows"
_SPAN, _WARP_ROWS, _STORED = 64, 32, 8
_SHARED_BYTES = 96 * 1024  # of a block, which every device with such tensor cores has
_KEPT = Kept(close=1.1, most=2)

CODED_ROWS = KernelTemplate(
    "coded_rows",
    params="int outputs, tiles, matrix_row, vector_row, scale_row, zero_row, bias_row",
    macros=(
        "vector_t scale_t zero_t bias_t codebook_t COMMON VECTORS BITS GROUP ONE_GROUP ROWS SCALE_GROUP ZERO_GROUP "
        "BIAS_GROUP CODE_KIND FLOAT_MANTISSA FLOAT_SCALE CODEBOOK ZEROS ZERO_BITS ZERO BIASES WARPS_N WARPS_K STAGES "
        "CLUSTER"
    ),
    inputs="matrix scales zeros biases entries vector",
    shared_bytes=None,
    files="tensor_cores.cuh grouped_codes.cuh scaled_codes.cuh clusters.cuh",
)


@dataclass(frozen=True)
class CodedRowsCosts:
    """What a launch costs, in clocks where nothing else is said.

    Attributes:
        latency: From the request of bytes to their arrival, while memory is busy.
        memory: The part of the memory's bandwidth that such a kernel gets at the most.
        core_bytes: Bytes that a multiprocessor gets a clock at the most, codes and vectors.
        span: Of a multiprocessor, for a span of a warp and each eight vectors.
        numbers: The same for making the numbers of a span.
        tile: To put the parts of a block's warps together, and store them.
        share: To put those of a cluster's blocks together, beside that.
    """

    latency: float
    memory: float
    core_bytes: float
    span: float
    numbers: float
    tile: float
    share: float


@dataclass(frozen=True)
class Work:
    """What threads share: rows of the vectors, rows of the matrix, numbers of each, and bits of their codes."""

    rows: int
    outputs: int
    k: int
    bits: int

    @property
    def columns(self) -> int:
        """Of the tensor cores' products."""
        return ceil_div(self.rows, 8) * 8


@dataclass(frozen=True)
class CodedRows:
    """How threads share the work.

    Attributes:
        warps_n, warps_k: Warps that have a tile's rows, 32 each, and sets of them that share k.
        stages: Parts of k in shared memory at a time.
        cluster: Blocks that share k.
    """

    warps_n: int
    warps_k: int
    stages: int
    cluster: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    @property
    def tile(self) -> int:
        """Rows of the matrix."""
        return _WARP_ROWS * self.warps_n

    def tiles(self, work: Work) -> int:
        return ceil_div(work.outputs, self.tile)

    def steps(self, work: Work) -> int:
        """Stages of a whole row."""
        return ceil_div(work.k, _SPAN * self.warps_k)

    def stage_bytes(self, work: Work) -> int:
        return self.warps_k * (self.tile * _SPAN * work.bits // 8 + work.columns * _SPAN * 2)

    def clusters(self, work: Work, device: DeviceModel) -> int:
        """Clusters that the launch has, of one block each where there are none."""
        tiles = self.tiles(work)
        return tiles if self.cluster > 1 else min(tiles, device.cores)

    def shared_bytes(self, work: Work) -> int:
        """Dynamic shared memory of a block; as in coded_rows.cuh."""
        part, share = 4 * (self.tile + 4), ceil_div(work.columns, self.cluster)
        gathered = self.cluster * share * part if self.cluster > 1 else 0
        return self.stages * self.stage_bytes(work) + work.columns * part + gathered + 4 * self.tile


def suits_coded_rows(found: Product) -> bool:
    """Whether the kernel takes a product of packed codes that `loads_packed` has looked at."""
    return MAX_ROWS < found.m <= _MAX_ROWS and found.batches == 1 and found.n > 0


def coded_rows_options(found: Product, group: Group, lowering: Lowering, positions: Positions) -> list[CallOption]:
    """The launches worth trying, the best first, each for devices with tensor cores or with clusters.

    Args:
        found: The product.
        group: What follows it.
        lowering: Where the trace's tensors are.
        positions: The operands of what follows.
    """
    codes = found.b.operand
    assert isinstance(codes, GroupedCodes)
    if not suits_coded_rows(found) or not offers(lowering.device, TENSOR_CORES):
        return []
    work = Work(found.m, found.n, found.k, codes.bits)
    return [
        CallOption(each.requires, (_lower(found, work, group, lowering, positions, each.sizes),))
        for each in _ranked(work, lowering.device)
    ]


@lru_cache(maxsize=1024)  # a model has the same product in many layers
def _ranked(work: Work, device: DeviceModel) -> tuple[Candidate[CodedRows], ...]:
    candidates = [*coded_rows_candidates(work, device)]
    return best_candidates([lambda work, device: candidates], work, device, _KEPT) if candidates else ()


def coded_rows_candidates(work: Work, device: DeviceModel) -> Iterator[Candidate[CodedRows]]:
    """All ways to share the work that fit, with what each should take; where there are clusters they require these."""
    costs = device.constants(_FAMILY, CodedRowsCosts)
    for cluster in (1, 2, 3, 4, 5, 6, 7, 8) if offers(device, CLUSTERS) else (1,):
        for warps_k in (1, 2, 4):
            for warps_n in range(1, 9):
                sizes = _sized(warps_n, warps_k, cluster, work, device)
                if sizes is not None:
                    clocks = _clocks(sizes, work, costs, device)
                    requires = CLUSTERS if offers(device, CLUSTERS) else TENSOR_CORES
                    yield Candidate(_FAMILY, sizes, device.microseconds(clocks), requires)


def _sized(warps_n: int, warps_k: int, cluster: int, work: Work, device: DeviceModel) -> CodedRows | None:
    """With as many stages as shared memory holds; None where these are too few, or blocks have nothing to do."""
    sizes = CodedRows(warps_n, warps_k, 0, cluster)
    most = device.shared_bytes if offers(device, CLUSTERS) else _SHARED_BYTES
    stages = (most - sizes.shared_bytes(work)) // sizes.stage_bytes(work)
    held = device.cores if cluster == 1 else cluster_cores(device).get(cluster, 0)
    waits = cluster > 1 and sizes.tiles(work) * cluster > held
    if not 4 <= warps_n * warps_k <= 12 or stages < 3 or sizes.steps(work) < 2 * cluster or waits:
        return None
    return CodedRows(warps_n, warps_k, min(stages, 12), cluster)


def _clocks(sizes: CodedRows, work: Work, costs: CodedRowsCosts, device: DeviceModel) -> float:
    """What a launch takes: bytes at the pace of the memory, or of what is on its way, or products."""
    blocks = sizes.clusters(work, device) * sizes.cluster
    steps = ceil_div(sizes.steps(work), sizes.cluster)
    turns = ceil_div(sizes.tiles(work) * sizes.cluster, blocks)
    code_bytes = sizes.warps_k * sizes.tile * _SPAN * work.bits / 8  # of a step
    step_bytes = sizes.stage_bytes(work)
    memory = blocks * code_bytes / (device.memory_a_clock * costs.memory)
    cache = blocks * step_bytes / device.cache_a_clock
    arriving = costs.latency / (sizes.stages - 1)
    products = sizes.warps_n * sizes.warps_k * (costs.numbers + costs.span * work.columns / 8)
    step = max(memory, cache, step_bytes / costs.core_bytes, arriving, products)
    return costs.latency + turns * (steps * step + costs.tile) + (costs.share if sizes.cluster > 1 else 0)


def _lower(
    found: Product, work: Work, group: Group, lowering: Lowering, positions: Positions, sizes: CodedRows
) -> KernelCall:
    codes, vector = found.b.operand, found.a
    assert isinstance(codes, GroupedCodes)
    size = min(_STORED // group.pairs, pack_size(group, positions.operands, group.shape[-1]))
    launch = Launch(
        CODED_ROWS,
        grid=(sizes.clusters(work, lowering.device) * sizes.cluster, 1, 1),
        values={
            "outputs": found.n,
            "tiles": sizes.tiles(work),
            "matrix_row": found.b.along,
            "vector_row": vector.along,
            **part_rows(codes),
        },
        macros={
            **part_macros(codes, vector.dtype),
            "vector_t": CUDA.storage[vector.dtype.name],
            "COMMON": found.k,
            "VECTORS": found.m,
            "GROUP": codes.group,
            "ONE_GROUP": int(codes.group >= found.k and codes.bias is None),
            "WARPS_N": sizes.warps_n,
            "WARPS_K": sizes.warps_k,
            "STAGES": sizes.stages,
            "CLUSTER": sizes.cluster,
        },
        inputs={
            "matrix": codes.argument,
            "scales": codes.scale.argument,
            "zeros": argument_of(codes.zeros, codes),
            "biases": argument_of(codes.bias, codes),
            "entries": argument_of(codes.codebook, codes),
            "vector": vector.argument,
        },
        flops=found.flops,
        block=(sizes.threads, 1, 1),
        shared_bytes=sizes.shared_bytes(work),
        extension=cluster_along_x(sizes.cluster),
    )
    return anchor_launch(launch, anchor_epilogue(group, positions, size), lowering)
