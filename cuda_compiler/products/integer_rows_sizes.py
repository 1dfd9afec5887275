"""How threads share a product of a few rows by codes that tensor cores multiply as integers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cuda_compiler.devices import cluster_cores
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel

__all__ = ["BUNDLE", "TILE", "IntegerRows", "IntegerRowsCosts", "Work", "integer_rows_sizes"]

TILE = 16
"""Rows of the matrix that a warp has at a time."""

BUNDLE = 4
"""Units that are the least that a warp has of a row."""

_BARRIERS = 16  # of a block, one of which all threads share
_LINE = 128  # bytes of shared memory that eight rows are read from at a time


@dataclass(frozen=True)
class IntegerRowsCosts:
    """What decides how threads share the work.

    Attributes:
        warps: Of a block at the most.
        shared_bytes: Of a block, so that those of the next launches find room beside it.
        tile: What it costs to put the parts of a tile together, in steps of a warp.
        share: The same of the blocks of a cluster.
        octet: What it costs a thread to make bytes of eight numbers of a vector.
        cluster: Blocks of a cluster, where there are any.
    """

    warps: int
    shared_bytes: int
    tile: float
    share: float
    octet: float
    cluster: int


@dataclass(frozen=True)
class Work:
    """What threads share.

    Attributes:
        rows: Rows of the vectors.
        outputs, k: Rows of the matrix, and codes of each.
        bits: Of a code.
        unit: Codes along k whose products add up as integers.
        group: Codes that share a scale; 0 where a row has but one.
        scale_bytes: Of a scale.
        zero_bits: Of a zero point in memory; 0 where there are none.
        computed: Numbers of the vectors that each block computes.
        values: Neighbouring results that a thread stores.
    """

    rows: int
    outputs: int
    k: int
    bits: int
    unit: int
    group: int
    scale_bytes: int
    zero_bits: int
    computed: int
    values: int

    @property
    def tiles(self) -> int:
        return self.outputs // TILE

    @property
    def bundles(self) -> int:
        return self.k // self.unit // BUNDLE

    @property
    def step(self) -> int:
        """Bundles that a warp takes at a time, whole lines of shared memory."""
        return max(1, _LINE // (BUNDLE * self.unit * self.bits // 8))

    @property
    def stage_bytes(self) -> int:
        """Of a step's codes and what belongs to them; as in integer_rows.cuh."""
        codes = self.step * BUNDLE * self.unit
        groups = codes // self.group if self.group else 1
        zeros = ceil_div(groups * self.zero_bits // 8 + 3, 4) * 4 if self.zero_bits else 0
        return TILE * (codes * self.bits // 8 + groups * self.scale_bytes + zeros)


@dataclass(frozen=True)
class IntegerRows:
    """How threads share the work.

    Attributes:
        teams: Sets of warps of a block that have a tile each.
        warps_k: Warps of a team, which share k.
        cluster: Blocks that share k.
        stages: Steps that each warp has on their way.
    """

    teams: int
    warps_k: int
    cluster: int
    stages: int

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.teams * self.warps_k

    def clusters(self, work: Work, device: DeviceModel) -> int:
        """Clusters that the launch has, of one block each where there are none: one block for a multiprocessor."""
        held = device.cores if self.cluster == 1 else cluster_cores(device)[self.cluster]
        return min(work.tiles, held // self.cluster)

    def turns(self, work: Work, device: DeviceModel) -> int:
        """Tiles of a team."""
        return ceil_div(work.tiles, self.clusters(work, device) * self.teams)

    def steps(self, work: Work) -> int:
        """Of a warp, for a tile."""
        return ceil_div(ceil_div(work.bundles, self.warps_k * self.cluster), work.step)

    def shared_bytes(self, work: Work) -> int:
        """Dynamic shared memory of a block; as in integer_rows.cuh."""
        bundles = ceil_div(work.bundles, self.cluster)
        vectors = work.rows * (2 * (bundles * BUNDLE * work.unit + 64) + bundles * BUNDLE * 8)
        parts = 2 * 4 * self.warps * max(1, ceil_div(work.rows, 4)) * 4 * (TILE + 4)
        share = ceil_div(TILE // work.values * work.rows, self.cluster) * work.values
        gathered = ceil_div(2 * 4 * self.teams * self.cluster * share, 16) * 16 if self.cluster > 1 else 0
        return self.warps * self.stages * work.stage_bytes + vectors + parts + gathered + 2 * work.computed


def integer_rows_sizes(work: Work, device: DeviceModel) -> IntegerRows | None:
    """Those whose busiest warp has the least to do, of these the fewest warps; None where nothing fits."""
    costs = device.constants("integer_rows", IntegerRowsCosts)

    def steps(sizes: IntegerRows) -> tuple[float, int]:
        tile = costs.tile + (costs.share if sizes.cluster > 1 else 0)
        octets = work.rows * work.k / 8 / sizes.cluster / (32 * sizes.warps)
        return sizes.turns(work, device) * (sizes.steps(work) + tile) + costs.octet * octets, sizes.warps

    ways = [sizes for sizes in _ways(work, costs, device) if sizes.shared_bytes(work) <= costs.shared_bytes]
    if not ways:
        return None
    best = min(ways, key=steps)
    stages = range(2, best.turns(work, device) * best.steps(work) + 1)
    deeper = (replace(best, stages=count) for count in stages)
    return max((best, *(each for each in deeper if each.shared_bytes(work) <= costs.shared_bytes)), key=_stages)


def _stages(sizes: IntegerRows) -> int:
    return sizes.stages


def _ways(work: Work, costs: IntegerRowsCosts, device: DeviceModel) -> Iterator[IntegerRows]:
    """With a step on its way; a row that each block computes whole is not shared by several."""
    for cluster in (1,) if work.computed else (1, costs.cluster):
        blocks = IntegerRows(1, 1, cluster, 1).clusters(work, device)
        for teams in range(1, min(costs.warps, ceil_div(work.tiles, blocks)) + 1):
            most = costs.warps // teams if teams < _BARRIERS else 1
            for warps_k in range(1, min(most, work.bundles // cluster) + 1):
                yield IntegerRows(teams, warps_k, cluster, 1)
