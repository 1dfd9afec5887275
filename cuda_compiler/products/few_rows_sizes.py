"""How threads share a product of a few rows by a matrix that is read once, and what each way should take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.devices import cluster_cores, offers
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants

__all__ = ["WARPS", "FewRows", "FewRowsCosts", "Work", "few_rows_candidates"]

WARPS = 8
"""Of a block."""

_SHARED_BYTES = 96 * 1024  # of a block, which every device with such tensor cores has
_SPAN = 32  # neighbours that four lanes have
_WORDS = 4  # registers of a lane for its part of them
_BEND = 8  # how sharply the pace of what is on its way bends to that of the memory
_ROW_REGISTERS = 40  # for the rows that it computes


@dataclass(frozen=True)
class FewRowsCosts(FamilyConstants, family="few_rows"):
    """What a launch costs, in clocks where nothing else is said.

    Attributes:
        latency: From the request of bytes to their arrival, while memory is busy.
        memory: The part of the memory's bandwidth that such a kernel gets at the most.
        core_bytes: Bytes that a multiprocessor gets a clock at the most.
        product: Of a multiprocessor, for a span of a warp: two products, and the load of their part.
        tile: To put the parts of a block's warps together, and store them.
        share: To put those of a cluster's blocks together, beside that, for each tile.
        start: From the start of a launch to its first request, and from its last result to the next launch.
        in_tiles: The part of the memory's bandwidth that kernels of tiles get, whose models have matrices in the cache.
    """

    latency: float
    memory: float
    core_bytes: float
    product: float
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
        is_computed: Whether blocks compute the vectors.
    """

    rows: int
    outputs: int
    k: int
    is_computed: bool

    @property
    def spans(self) -> int:
        """Parts of a row that four lanes read side by side."""
        return ceil_div(self.k, _SPAN)

    @property
    def groups(self) -> int:
        """Sets of eight vectors, which tensor cores multiply at a time."""
        return ceil_div(self.rows, 8)


@dataclass(frozen=True)
class FewRows:
    """How threads share the work.

    Attributes:
        tiles: Sets of 16 rows of the matrix that a warp has at a time.
        cluster: Blocks that share them.
        depth: Spans that each warp has on their way.
        resident: Blocks of a multiprocessor.
    """

    tiles: int
    cluster: int
    depth: int
    resident: int

    def spans_each(self, work: Work) -> int:
        """Spans of a row that are a warp's."""
        return ceil_div(work.spans, WARPS * self.cluster)

    def results(self, work: Work) -> int:
        """Tiles of the whole result."""
        return ceil_div(work.outputs, 16 * self.tiles)

    def clusters(self, work: Work, device: DeviceModel) -> int:
        """Clusters that the launch has; of one block each where there are none."""
        held = device.cores if self.cluster == 1 else cluster_cores(device)[self.cluster]
        return min(self.results(work), held * self.resident // self.cluster)

    def vector_spans(self, work: Work) -> int:
        """Spans of the vectors that a block holds."""
        return work.spans if work.is_computed or self.cluster == 1 else WARPS * self.spans_each(work)

    def shared_bytes(self, work: Work, values: int) -> int:
        """Dynamic shared memory of a block whose threads store so many values at a time; as in few_rows.cuh."""
        tile, spans, wide = 16 * self.tiles, self.vector_spans(work), self.tiles > 1
        parts = (1 if wide else 2) * WARPS * 8 * work.groups * (tile + 4)
        share = ceil_div(tile // values * work.rows, self.cluster)
        gathered = 2 * self.cluster * share * values if self.cluster > 1 else 0
        width = spans * _SPAN
        row = width + (0 if width % 64 == 32 else 32)
        return 4 * ceil_div(parts + gathered, 4) * 4 + 2 * work.rows * row


def few_rows_candidates(work: Work, device: DeviceModel) -> Iterator[Candidate[FewRows]]:
    """All ways to share the work that fit, with what each should take; those with clusters require them."""
    costs = FewRowsCosts.of(device)
    clusters = [n for n in (1, 2, 4, 8) if n == 1 or (offers(device, CLUSTERS) and not work.is_computed)]
    for cluster in clusters:
        for tiles in (1, 2, 3, 4):
            for sizes in _residents(tiles, cluster, work, device):
                microseconds = device.microseconds(_clocks(sizes, work, costs, device))
                yield Candidate(costs.family, sizes, microseconds, CLUSTERS if cluster > 1 else "")


def _residents(tiles: int, cluster: int, work: Work, device: DeviceModel) -> Iterator[FewRows]:
    """Two blocks of a multiprocessor, and one where the launch is then another."""
    two, one = (_sized(tiles, cluster, resident, work, device) for resident in (2, 1))
    if two is not None:
        yield two
    if one is not None:
        same = two is not None and one.depth == two.depth and one.clusters(work, device) == two.clusters(work, device)
        if not same:
            yield one


def _sized(tiles: int, cluster: int, resident: int, work: Work, device: DeviceModel) -> FewRows | None:
    """The sizes with as much on its way as registers hold; None where these, or shared memory, do not suffice."""
    sizes = FewRows(tiles, cluster, 1, resident)
    spans = sizes.spans_each(work)
    if cluster > 1 and 2 * work.spans <= WARPS * cluster:  # at least half of the warps have something
        return None
    others = 56 + 4 * tiles * work.groups + _ROW_REGISTERS * work.is_computed
    most = (65536 // (32 * WARPS * resident) - others) // (2 * tiles * _WORDS)
    shared = device.core_shared_bytes // resident - 1024
    if most < 1 or sizes.shared_bytes(work, 1) > min(shared, device.shared_bytes if cluster > 1 else _SHARED_BYTES):
        return None
    return replace(sizes, depth=ceil_div(spans, ceil_div(spans, most)))


def _clocks(sizes: FewRows, work: Work, costs: FewRowsCosts, device: DeviceModel) -> float:
    """What a launch takes: bytes at the pace of the memory or of what is on its way, and what the busiest has left."""
    clusters, spans = sizes.clusters(work, device), sizes.spans_each(work)
    running, of_busiest = clusters * sizes.cluster, _tiles_of_busiest(sizes, work, clusters, device)
    span_bytes = 2 * sizes.tiles * 32 * _WORDS * 4  # that a warp loads
    tile_bytes = WARPS * spans * span_bytes  # of a block
    on_their_way = running * WARPS * sizes.depth * span_bytes
    fastest = _pace(device.memory_a_clock * costs.memory, on_their_way / costs.latency)
    total = sizes.results(work) * sizes.cluster * tile_bytes
    left = of_busiest * tile_bytes - total / device.cores
    products = sizes.tiles * work.groups * costs.product  # of a span
    staged = running * work.rows * sizes.vector_spans(work) * _SPAN * 2 / device.cache_a_clock
    late = WARPS * sizes.depth * products / 2  # half of what is on its way
    turns = of_busiest if sizes.resident == 1 else 1  # two blocks do not wait at the same time
    ending = late + turns * costs.tile * work.groups + (of_busiest * costs.share if sizes.cluster > 1 else 0)
    streaming = max(total / fastest + left / costs.core_bytes, of_busiest * WARPS * spans * products)
    return costs.start + costs.latency + staged + streaming + ending


def _pace(most: float, asked: float) -> float:
    """Bytes a clock of a memory that gives so many at the most; fewer where no more than about these are asked for."""
    return float((most**-_BEND + asked**-_BEND) ** (-1 / _BEND))


def _tiles_of_busiest(sizes: FewRows, work: Work, clusters: int, device: DeviceModel) -> int:
    """Tiles that the blocks of the busiest multiprocessor have together: clusters fill one before the next."""
    results = sizes.results(work)
    cores = device.cores if sizes.cluster == 1 else ceil_div(clusters, sizes.resident)
    return sum(ceil_div(results - first, clusters) for first in range(0, clusters, cores))
