"""How threads share a product of a few rows by a matrix that is read once, and what each way should take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.devices import cluster_cores, offers
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel

__all__ = ["QUAD", "WARPS", "FewRows", "FewRowsCosts", "Work", "few_rows_candidates", "few_rows_costs"]

WARPS, QUAD = 8, 4
"""Warps of a block, and lanes that read a row side by side."""

_FAMILY = "few_rows"
_SHARED_BYTES = 96 * 1024  # of a block, which every device with such tensor cores has
_CODE_REGISTERS = {16: 0, 8: 12, 4: 26}  # of a thread, for what makes codes numbers, by their bits
_ROW_REGISTERS = 40  # for the rows that it computes


@dataclass(frozen=True)
class FewRowsCosts:
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
        return ceil_div(self.k, QUAD * self.chunk)

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
        return min(ceil_div(self.results(work), WARPS // self.warps_k), held * self.resident // self.cluster)

    def vector_spans(self, work: Work) -> int:
        """Spans of the vectors that a block holds."""
        return work.spans if work.is_computed or self.cluster == 1 else self.warps_k * self.spans_each(work)

    def shared_bytes(self, work: Work, values: int) -> int:
        """Dynamic shared memory of a block whose threads store so many values at a time; as in few_rows_stream.cuh."""
        tile, spans, wide = 16 * self.tiles, self.vector_spans(work), self.tiles * work.blocks > 1
        parts = (1 if wide else 2) * WARPS * work.blocks * 8 * (tile + 4)
        share = ceil_div(tile // values * work.rows, self.cluster)
        gathered = 2 * self.cluster * share * values if self.cluster > 1 else 0
        sums = spans * work.blocks * 8 if work.bits == 4 else 0
        width = spans * QUAD * work.chunk
        row = width + (0 if width % 64 == 32 else 32)
        return 4 * ceil_div(parts + gathered + sums, 4) * 4 + 2 * work.rows * row


def few_rows_costs(device: DeviceModel) -> FewRowsCosts:
    """What launches cost on a device."""
    return device.constants(_FAMILY, FewRowsCosts)


def few_rows_candidates(work: Work, device: DeviceModel) -> Iterator[Candidate[FewRows]]:
    """All ways to share the work that fit, with what each should take; those with clusters require them."""
    costs = few_rows_costs(device)
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
    most = (65536 // (32 * WARPS * resident) - others) // span_words
    span = QUAD * work.chunk
    if work.group > span:  # four lanes hold the groups of a round
        most = min(most, 2 * work.group // span + 2)
    shared = device.core_shared_bytes // resident - 1024
    if most < 1 or sizes.shared_bytes(work, 1) > min(shared, device.shared_bytes if cluster > 1 else _SHARED_BYTES):
        return None
    return replace(sizes, depth=ceil_div(spans, ceil_div(spans, most)))


def _clocks(sizes: FewRows, work: Work, costs: FewRowsCosts, device: DeviceModel) -> float:
    """What a launch takes: bytes at the pace of the memory, or of what is on its way; what follows the last of them."""
    clusters, teams = sizes.clusters(work, device), WARPS // sizes.warps_k
    running = clusters * sizes.cluster
    spans = sizes.spans_each(work)
    span_bytes = 2 * sizes.tiles * 32 * work.words * 4  # that a warp loads
    rounds, left = divmod(sizes.results(work), clusters * teams)
    fastest = device.memory_a_clock * costs.memory
    parts = [(rounds, running)] + ([(1, ceil_div(left, teams) * sizes.cluster)] if left else [])
    clocks = 0.0
    for times, blocks in parts:
        on_their_way = blocks * WARPS * sizes.depth * span_bytes / costs.latency
        pace = min(fastest, on_their_way, min(blocks, device.cores) * costs.core_bytes)
        moved = blocks * WARPS * spans * span_bytes
        busiest = ceil_div(blocks, device.cores)
        issued = busiest * WARPS * spans * _span_instructions(sizes, work, costs) / costs.issued
        chained = spans * work.chunk // 8 * costs.chain
        clocks += times * max(moved / pace, issued, chained, costs.tile)
    staged = running * work.rows * sizes.vector_spans(work) * QUAD * work.chunk * 2 / device.cache_a_clock
    late = WARPS * sizes.depth * _span_instructions(sizes, work, costs) / costs.issued / 2  # half of what is on its way
    ending = late + costs.tile + (costs.share if sizes.cluster > 1 else 0)
    return costs.start + costs.latency + staged + clocks + ending


def _span_instructions(sizes: FewRows, work: Work, costs: FewRowsCosts) -> float:
    """Instructions of a warp for a span of all rows of its tile."""
    octets = work.chunk // 8
    numbers = 2 * sizes.tiles * octets * costs.octet if work.bits < 16 else 0
    groups = 2 * sizes.tiles * costs.group if work.group else 0
    return numbers + groups + octets * sizes.tiles * work.blocks * costs.product
