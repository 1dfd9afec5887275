"""How threads share a product of many rows by packed codes, and what each way should take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from cuda_compiler.artifact.vocabulary import CLUSTERS, TENSOR_CORES, WARPGROUPS
from cuda_compiler.devices import brings_boxes, cluster_cores, offers
from cuda_compiler.tiles.wgmma import WARPGROUP_ROWS
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants

__all__ = ["ByWarpgroups", "ByWarps", "CodedRows", "CodedRowsCosts", "Work", "coded_rows_candidates"]

_WARP_SPAN = 64  # codes of a row that four lanes have side by side
_BRINGING_THREADS = 128  # that copy and bring what belongs to groups
_SHARED_BYTES = 96 * 1024  # of a block, which every device with such tensor cores has
_COLUMN, _GATHERED = 8, 64  # vectors of a tensor cores' product, and those whose sums are put together at a time
_MOST_PLACES = 128  # of a row that warpgroups take as one: a line of 128 bytes where codes have 8 bits
_PIECE = 32  # codes that are always of one group
_ROW_VALUES = 16  # bytes; what needs more is read for each result
_LEAST_STAGES, _MOST_STAGES = 3, 16


@dataclass(frozen=True)
class Pace:
    """What a multiprocessor does.

    Attributes:
        launch: Clocks of a launch beside its spans.
        block: Clocks of a tile beside its spans, for each block of a cluster.
        latency: Clocks from the request of bytes to their arrival, while memory is busy.
        step: Clocks of a span beside what follows.
        numbers, columns: Clocks for 64 places of 32 rows: to make their numbers, and for each eight vectors.
        nbytes: Bytes that it gets a clock at the most, codes and vectors.
    """

    launch: float
    block: float
    latency: float
    step: float
    numbers: float
    columns: float
    nbytes: float


@dataclass(frozen=True)
class CodedRowsCosts(FamilyConstants, family="coded_rows"):
    """What a launch costs.

    Attributes:
        memory: The part of the memory's bandwidth that such a kernel gets at the most.
        warps, warpgroups: The pace of products of the two ways.
    """

    memory: float
    warps: Pace
    warpgroups: Pace


@dataclass(frozen=True)
class Work:
    """What threads share.

    Attributes:
        rows: Rows of the vectors.
        outputs: Rows of the matrix.
        k: Numbers of each.
        bits: Of their codes.
        group: Codes of a row that have the same scale, zero point and bias.
        group_bytes: What a group has of these until sums are scaled; 0 where all of it comes last.
    """

    rows: int
    outputs: int
    k: int
    bits: int
    group: int
    group_bytes: int = 0


@dataclass(frozen=True)
class CodedRows(ABC):
    """How threads share the work.

    Attributes:
        stages: Parts of k in shared memory at a time.
        cluster: Blocks that share k.
    """

    stages: int
    cluster: int

    @property
    @abstractmethod
    def tile(self) -> int:
        """Rows of the matrix that a block has at a time."""

    @property
    @abstractmethod
    def sets(self) -> int:
        """Spans of a stage."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Of a block."""

    @property
    def part(self) -> int:
        """Rows of a tile that the same threads put together."""
        return self.tile

    def columns(self, work: Work) -> int:
        """Of the tensor cores' products: vectors of a tile, and some that there are not."""
        return ceil_div(work.rows, _COLUMN) * _COLUMN

    @abstractmethod
    def span(self, work: Work) -> int:
        """Codes of a row that are brought together."""

    def extra_bytes(self, work: Work) -> int:
        """Of a stage, beside codes and vectors."""
        return 0

    def spans(self, work: Work) -> int:
        """Of a row."""
        return ceil_div(work.k, self.span(work))

    def tiles(self, work: Work) -> int:
        """Of the whole result."""
        return ceil_div(work.outputs, self.tile) * self.turns(work)

    def turns(self, work: Work) -> int:
        """Tiles of the same rows of the matrix."""
        return ceil_div(work.rows, self.columns(work))

    def stage_bytes(self, work: Work) -> int:
        """Codes and vectors of a stage in shared memory."""
        span = self.span(work)
        return self.sets * (self.tile * span * work.bits // 8 + self.columns(work) * span * 2)

    def clusters(self, work: Work, device: DeviceModel) -> int:
        """Clusters that the launch has, of one block each where there are none."""
        tiles = self.tiles(work)
        return tiles if self.cluster > 1 else min(tiles, device.cores)

    def shared_bytes(self, work: Work) -> int:
        """Dynamic shared memory of a block; as in the kernels' files."""
        together = min(self.columns(work), _GATHERED)
        gathered = self.cluster * ceil_div(together, self.cluster) if self.cluster > 1 else 0
        sums = self.tile // self.part * (self.part + 4) * (together + gathered)
        staged = self.stages * (self.stage_bytes(work) + self.extra_bytes(work))
        return staged + 4 * sums + 4 * self.tile

    def filling(self, work: Work, device: DeviceModel) -> Self | None:
        """The same with as many stages as shared memory holds; None where these are too few, or blocks would wait."""
        most = device.shared_bytes if offers(device, CLUSTERS) else _SHARED_BYTES
        held = device.cores if self.cluster == 1 else cluster_cores(device).get(self.cluster, 0)
        stages = (most - replace(self, stages=0).shared_bytes(work)) // (
            self.stage_bytes(work) + self.extra_bytes(work)
        )
        waits = self.cluster > 1 and self.tiles(work) * self.cluster > held
        if stages < _LEAST_STAGES or ceil_div(self.spans(work), self.sets) < 2 * self.cluster or waits:
            return None
        return replace(self, stages=min(stages, _MOST_STAGES))


@dataclass(frozen=True)
class ByWarps(CodedRows):
    """Each warp makes numbers of 32 rows of the matrix, and multiplies them.

    Attributes:
        warps_n, warps_k: Warps that have a tile's rows, and sets of them that have spans in turns.
    """

    warps_n: int
    warps_k: int

    @property
    def tile(self) -> int:
        return 32 * self.warps_n

    @property
    def sets(self) -> int:
        return self.warps_k

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    def span(self, work: Work) -> int:
        return _WARP_SPAN


@dataclass(frozen=True)
class ByWarpgroups(CodedRows):
    """Warpgroups make numbers of 64 rows of the matrix each, and multiply them beside that; another one brings.

    Attributes:
        groups: Those that multiply.
        most: Vectors of a tile at the most: up to 64, or a multiple of 64.
        places: Codes of a row that are brought together: 64 or 128.
    """

    groups: int
    most: int = _GATHERED
    places: int = _MOST_PLACES

    @property
    def part(self) -> int:
        return WARPGROUP_ROWS

    def columns(self, work: Work) -> int:
        step = _COLUMN if work.rows <= _GATHERED else _GATHERED
        return min(self.most, ceil_div(work.rows, step) * step)

    @property
    def tile(self) -> int:
        return WARPGROUP_ROWS * self.groups

    @property
    def sets(self) -> int:
        return 1

    @property
    def threads(self) -> int:
        return _BRINGING_THREADS + 128 * self.groups

    def span(self, work: Work) -> int:
        return self.places

    def shared_bytes(self, work: Work) -> int:
        return super().shared_bytes(work) + self.columns(work) * self.row_values(work)

    def row_values(self, work: Work) -> int:
        """Bytes for what an epilogue reads once for each row of the result: where a tile has all vectors."""
        return _ROW_VALUES if self.turns(work) == 1 else 0

    def extra_bytes(self, work: Work) -> int:
        span, group = self.span(work), work.group
        whole = span if group % span == 0 or group >= work.k else group if span % group == 0 else _PIECE
        return 16 + span // whole * self.tile * work.group_bytes


def coded_rows_candidates(work: Work, device: DeviceModel) -> Iterator[Candidate[CodedRows]]:
    """All ways to share the work that fit, with what each should take."""
    costs = CodedRowsCosts.of(device)
    for requires, each in _few(device) if work.rows <= _GATHERED else _many(work, device):
        sizes = each.filling(work, device)
        if sizes is not None:
            clocks = _clocks(sizes, work, costs, device)
            yield Candidate(costs.family, sizes, device.microseconds(clocks), requires)


def _many(work: Work, device: DeviceModel) -> Iterator[tuple[str, CodedRows]]:
    """As below, for vectors of which a tile has a part."""
    if not brings_boxes(device):
        return
    for groups, most in ((3, 64), (2, 128), (2, 192), (2, 256)):
        if most - _GATHERED < work.rows:
            yield from ((WARPGROUPS, ByWarpgroups(0, 1, groups, most, places)) for places in (64, _MOST_PLACES))


def _few(device: DeviceModel) -> Iterator[tuple[str, CodedRows]]:
    """What is required, and the sizes but for the stages."""
    for cluster in range(1, 9) if offers(device, CLUSTERS) else (1,):
        yield from _in_clusters(cluster, device)


def _in_clusters(cluster: int, device: DeviceModel) -> Iterator[tuple[str, CodedRows]]:
    if brings_boxes(device):
        yield from ((WARPGROUPS, ByWarpgroups(0, cluster, groups)) for groups in (1, 2, 3))
    requires = CLUSTERS if offers(device, CLUSTERS) else TENSOR_CORES
    for warps_k in (2, 4):  # with one set all wait for the same copies, a fifth longer as measured
        for warps_n in range(1, 9):
            if 4 <= warps_n * warps_k <= 12:
                yield requires, ByWarps(0, cluster, warps_n, warps_k)


def _clocks(sizes: CodedRows, work: Work, costs: CodedRowsCosts, device: DeviceModel) -> float:
    """What a launch takes: bytes at the pace of the memory, or of what is on its way, or products."""
    blocks = sizes.clusters(work, device) * sizes.cluster
    steps = ceil_div(ceil_div(sizes.spans(work), sizes.sets), sizes.cluster)
    turns = ceil_div(sizes.tiles(work) * sizes.cluster, blocks)
    code_bytes = sizes.sets * sizes.tile * sizes.span(work) * work.bits / 8  # of a step
    step_bytes = sizes.stage_bytes(work)
    memory = blocks * code_bytes / sizes.turns(work) / (device.memory_a_clock * costs.memory)
    pace = costs.warpgroups if isinstance(sizes, ByWarpgroups) else costs.warps
    arriving = pace.latency / (sizes.stages - 1)
    rows = pace.numbers + pace.columns * sizes.columns(work) / _COLUMN
    products = pace.step + sizes.sets * sizes.span(work) / 64 * sizes.tile / 32 * rows
    step = max(memory, step_bytes / pace.nbytes, arriving, products)
    return pace.launch + turns * (pace.block * sizes.cluster + steps * step)
