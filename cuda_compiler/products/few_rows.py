"""Lowers products of a few rows by a matrix of numbers or packed codes, the operand of 16 rows of tensor cores.

A product of so few rows takes as long as its matrix takes to arrive. So nothing lies between memory and the registers
that tensor cores read, and where the matrix has too few rows for all multiprocessors, clusters of blocks share these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from cuda_compiler.anchors import anchor_epilogue, anchor_launch
from cuda_compiler.artifact.extensions import cluster_along_x
from cuda_compiler.artifact.vocabulary import CLUSTERS, TENSOR_CORES
from cuda_compiler.devices import cluster_cores, offers
from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import EarlyLaunch
from cuda_compiler.packing import pack_size
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

__all__ = ["FEW_ROWS", "FewRows", "Work", "few_rows_candidates", "few_rows_options", "loads_rows", "ranked_few_rows"]
__all__ += ["is_quicker", "suits_few_rows", "work_of"]

_MAX_ROWS, _MAX_COMPUTED_ROWS = 32, 16
_WARPS, _QUAD = 8, 4
_THREADS = 32 * _WARPS
_PREFIX, _FAMILY = "v", "few_rows"
_SHARED_BYTES = 96 * 1024  # of a block, which every device from there on has
_COMPUTED_BYTES = 64 * 1024  # of rows that each block computes
_KEPT = Kept(close=1.15, most=2)
_CODE_REGISTERS = {16: 0, 8: 12, 4: 26}  # of a thread, for what makes codes numbers, by their bits
_ROW_REGISTERS = 40  # for the rows that it computes

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


@dataclass(frozen=True)
class _Costs:
    """What a launch costs, in clocks where nothing else is said.

    Attributes:
        latency: From the request of bytes to their arrival, while memory is busy.
        memory: The part of the memory's bandwidth that such a kernel gets at the most.
        core_bytes: Bytes that a multiprocessor gets a clock at the most.
        chain: Clocks from an octet to the next one of the same warp, whose sums wait for each other.
        issued: Instructions of a multiprocessor a clock, while few warps wait for each other's.
        octet: Instructions of a warp for eight codes of a lane: to make them numbers.
        product: For eight numbers of a lane and eight columns: two products, and the load of the vectors' part.
        group: For a lane's row of a group: its scale and zero point.
        tile: To put the parts of a block's warps together, and store them.
        share: To put those of a cluster's blocks together, beside that.
        start: From the start of a launch to its first request, and from its last result to the next launch.
        in_tiles: The part of the memory's bandwidth that kernels of tiles get, whose models have matrices in the cache.
    """

    latency: float
    memory: float
    core_bytes: float
    chain: float
    issued: float
    octet: float
    product: float
    group: float
    tile: float
    share: float
    start: float
    in_tiles: float


@dataclass(frozen=True)
class Work:
    """What threads share.

    Attributes:
        rows: Rows of the vectors.
        outputs, k: Rows of the matrix, and numbers of each.
        bits: Of a number or code.
        chunk: Neighbours of a lane.
        group: How many share a scale, a multiple of what four lanes have; 0 where all of a row do, or none is needed.
        is_computed: Whether blocks compute the vectors.
    """

    rows: int
    outputs: int
    k: int
    bits: int
    chunk: int
    group: int
    is_computed: bool

    @property
    def spans(self) -> int:
        """Parts of a row that four lanes read side by side."""
        return ceil_div(self.k, _QUAD * self.chunk)

    @property
    def words(self) -> int:
        """Registers of a chunk."""
        return self.chunk * self.bits // 32

    @property
    def blocks(self) -> int:
        """Blocks of eight columns."""
        return ceil_div(self.rows, 8)


@dataclass(frozen=True)
class FewRows:
    """How threads share the work.

    Attributes:
        tiles: Sets of 16 rows of the matrix that a warp has at a time.
        warps_k: Warps of a block that share them.
        cluster: Blocks that do.
        depth: Spans that each warp has on their way.
        resident: Blocks of a multiprocessor.
    """

    tiles: int
    warps_k: int
    cluster: int
    depth: int
    resident: int

    def spans_each(self, work: Work) -> int:
        """Spans of a row that are a warp's."""
        return ceil_div(work.spans, self.warps_k * self.cluster)

    def results(self, work: Work) -> int:
        """Tiles of the whole result."""
        return ceil_div(work.outputs, 16 * self.tiles)

    def clusters(self, work: Work, device: DeviceModel) -> int:
        """Clusters that the launch has; of one block each where there are none."""
        held = device.cores if self.cluster == 1 else cluster_cores(device)[self.cluster]
        return min(ceil_div(self.results(work), _WARPS // self.warps_k), held * self.resident // self.cluster)

    def vector_spans(self, work: Work) -> int:
        """Spans of the vectors that a block holds."""
        return work.spans if work.is_computed or self.cluster == 1 else self.warps_k * self.spans_each(work)

    def shared_bytes(self, work: Work, values: int) -> int:
        """Dynamic shared memory of a block whose threads store so many values at a time; as in few_rows_stream.cuh."""
        tile, spans, wide = 16 * self.tiles, self.vector_spans(work), self.tiles * work.blocks > 1
        parts = (1 if wide else 2) * _WARPS * work.blocks * 8 * (tile + 4)
        share = ceil_div(tile // values * work.rows, self.cluster)
        gathered = 2 * self.cluster * share * values if self.cluster > 1 else 0
        sums = spans * work.blocks * 8 if work.bits == 4 else 0
        width = spans * _QUAD * work.chunk
        row = width + (0 if width % 64 == 32 else 32)
        return 4 * ceil_div(parts + gathered + sums, 4) * 4 + 2 * work.rows * row


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
        if fits and (whole or codes.group % (_QUAD * chunk) == 0):
            by_row = whole and codes.zeros is None and codes.bits == 8
            span = _QUAD * chunk
            group = 0 if by_row else ceil_div(found.k, span) * span if whole else codes.group
            return Work(found.m, found.n, found.k, codes.bits, chunk, group, is_computed)
    return None


def few_rows_candidates(work: Work, device: DeviceModel) -> Iterator[Candidate[FewRows]]:
    """All ways to share the work that fit, with what each should take; those with clusters require them."""
    costs = device.constants(_FAMILY, _Costs)
    clusters = [n for n in (1, 2, 4, 8) if n == 1 or (offers(device, CLUSTERS) and not work.is_computed)]
    shares = [(cluster, warps_k) for cluster in clusters for warps_k in ((8,) if cluster > 1 else (8, 4, 2, 1))]
    for cluster, warps_k in shares:
        for tiles in (1, 2, 3, 4):
            for sizes in _residents(tiles, warps_k, cluster, work, device):
                microseconds = device.microseconds(_clocks(sizes, work, costs, device))
                yield Candidate(_FAMILY, sizes, microseconds, CLUSTERS if cluster > 1 else "")


def _residents(tiles: int, warps_k: int, cluster: int, work: Work, device: DeviceModel) -> Iterator[FewRows]:
    """Two blocks of a multiprocessor, and one where the launch is then another."""
    two, one = (_sized(tiles, warps_k, cluster, resident, work, device) for resident in (2, 1))
    if two is not None:
        yield two
    if one is not None:
        same = two is not None and one.depth == two.depth and one.clusters(work, device) == two.clusters(work, device)
        if not same:
            yield one


def _sized(tiles: int, warps_k: int, cluster: int, resident: int, work: Work, device: DeviceModel) -> FewRows | None:
    """The sizes with as much on its way as registers hold; None where these, or shared memory, do not suffice."""
    sizes = FewRows(tiles, warps_k, cluster, 1, resident)
    spans, columns = sizes.spans_each(work), tiles * work.blocks
    if columns > 4 or 2 * work.spans <= warps_k * cluster:  # at least half of the warps have something
        return None
    others = 56 + 4 * columns + 6 * (work.blocks - 1) + _CODE_REGISTERS[work.bits] + _ROW_REGISTERS * work.is_computed
    span_words = 2 * tiles * work.words
    most = (65536 // (_THREADS * resident) - others) // span_words
    span = _QUAD * work.chunk
    if work.group > span:  # four lanes hold the groups of a round
        most = min(most, 2 * work.group // span + 2)
    shared = device.core_shared_bytes // resident - 1024
    if most < 1 or sizes.shared_bytes(work, 1) > min(shared, device.shared_bytes if cluster > 1 else _SHARED_BYTES):
        return None
    return replace(sizes, depth=ceil_div(spans, ceil_div(spans, most)))


def _clocks(sizes: FewRows, work: Work, costs: _Costs, device: DeviceModel) -> float:
    """What a launch takes: bytes at the pace of the memory, or of what is on its way; what follows the last of them."""
    clusters, teams = sizes.clusters(work, device), _WARPS // sizes.warps_k
    running = clusters * sizes.cluster
    spans = sizes.spans_each(work)
    span_bytes = 2 * sizes.tiles * 32 * work.words * 4  # that a warp loads
    rounds, left = divmod(sizes.results(work), clusters * teams)
    fastest = device.memory_a_clock * costs.memory
    parts = [(rounds, running)] + ([(1, ceil_div(left, teams) * sizes.cluster)] if left else [])
    clocks = 0.0
    for times, blocks in parts:
        on_their_way = blocks * _WARPS * sizes.depth * span_bytes / costs.latency
        pace = min(fastest, on_their_way, min(blocks, device.cores) * costs.core_bytes)
        moved = blocks * _WARPS * spans * span_bytes
        busiest = ceil_div(blocks, device.cores)
        issued = busiest * _WARPS * spans * _span_instructions(sizes, work, costs) / costs.issued
        chained = spans * work.chunk // 8 * costs.chain
        clocks += times * max(moved / pace, issued, chained, costs.tile)
    staged = running * work.rows * sizes.vector_spans(work) * _QUAD * work.chunk * 2 / device.cache_a_clock
    late = (
        _WARPS * sizes.depth * _span_instructions(sizes, work, costs) / costs.issued / 2
    )  # half of what is on its way
    ending = late + costs.tile + (costs.share if sizes.cluster > 1 else 0)
    return costs.start + costs.latency + staged + clocks + ending


def _span_instructions(sizes: FewRows, work: Work, costs: _Costs) -> float:
    """Instructions of a warp for a span of all rows of its tile."""
    octets = work.chunk // 8
    numbers = 2 * sizes.tiles * octets * costs.octet if work.bits < 16 else 0
    groups = 2 * sizes.tiles * costs.group if work.group else 0
    return numbers + groups + octets * sizes.tiles * work.blocks * costs.product


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
    pace = device.memory_a_clock * device.constants(_FAMILY, _Costs).in_tiles
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
