"""How threads share a product of 2 to 16 rows by codes that come through shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cuda_compiler.devices import cluster_cores
from cuda_compiler.products.coded_tiles import BUNDLE, TILE, CodedTiles
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants

__all__ = ["FewCodes", "FewCodesCosts", "Work", "few_codes_sizes", "held_beside"]

_BARRIERS = 16  # of a block, one of which all threads share
_KEPT_BYTES = 1088  # of shared memory that the driver keeps, 1,024, and this kernel declares, for each block


@dataclass(frozen=True)
class FewCodesCosts(FamilyConstants, family="few_codes"):
    """What decides how threads share the work.

    Attributes:
        warps: Of a block, by the bits of a code, up to which more warps share k than make the vectors ready.
        stages: Steps that a warp has on their way at the most: of more, the first comes later.
        shared_bytes: Of a block at the most.
        cluster: What it costs a block to put its parts of a tile together with those of each block of its cluster, in
            bytes that it loads meanwhile.
    """

    warps: Mapping[int, int]
    stages: int
    shared_bytes: int
    cluster: int


@dataclass(frozen=True)
class Work(CodedTiles):
    """What threads share.

    Attributes:
        rows: Rows of the vectors.
        is_computed: Whether blocks compute the vectors.
    """

    rows: int
    is_computed: bool

    @property
    def columns(self) -> int:
        """Of the operand that vectors are, in groups of eight."""
        return ceil_div(self.rows, 8) * 8

    @property
    def stage_bytes(self) -> int:
        """Of a step's codes and what belongs to them; as in few_codes_ring.cuh."""
        codes = self.step * BUNDLE * self.unit
        groups = codes // self.group if self.group else 1
        zeros = ceil_div(groups * self.zero_bits // 8 + 3, 4) * 4 if self.zero_bits else 0
        return TILE * (codes * self.bits // 8 + groups * self.scale_bytes + zeros)


@dataclass(frozen=True)
class FewCodes:
    """How threads share the work.

    Attributes:
        teams: Sets of warps of a block that have a tile each.
        warps_k: Warps of a team, which share k.
        stages: Steps that each warp has on their way.
        cluster: Blocks that share k.
        in_place: Whether warps leave their parts of a tile where its codes were.
    """

    teams: int
    warps_k: int
    stages: int
    cluster: int = 1
    in_place: bool = False

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.teams * self.warps_k

    def clusters(self, work: Work, device: DeviceModel) -> int:
        """Clusters that the launch has; of one block each where there are none."""
        tiles = ceil_div(work.tiles, 1 if self.cluster == 1 else self.teams)
        return min(tiles, _held(self.cluster, device))

    def blocks(self, work: Work, device: DeviceModel) -> int:
        """That the launch has."""
        return self.clusters(work, device) * self.cluster

    def turns(self, work: Work, device: DeviceModel) -> int:
        """Tiles of a team."""
        return ceil_div(work.tiles, self.clusters(work, device) * self.teams)

    def bundles(self, work: Work) -> int:
        """Of a row, those of a block at the most."""
        return ceil_div(work.bundles, self.cluster)

    def steps(self, work: Work, device: DeviceModel) -> int:
        """Of a warp, for all of its tiles."""
        return self.turns(work, device) * ceil_div(ceil_div(self.bundles(work), self.warps_k), work.step)

    def may_be_in_place(self, work: Work, device: DeviceModel) -> bool:
        """Whether no codes of another tile come where a tile's parts are left, and no other block reads these."""
        return self.cluster == 1 and self.turns(work, device) == 1

    def vector_bytes(self, work: Work) -> int:
        """Of the vectors in a block."""
        return 2 * work.rows * (self.bundles(work) * BUNDLE * work.unit + (32 if work.bits == 4 else 16))

    def block_bytes(self, work: Work, device: DeviceModel) -> int:
        """That the busiest block loads."""
        steps = self.turns(work, device) * self.teams * ceil_div(self.bundles(work), work.step)
        return steps * work.stage_bytes + self.vector_bytes(work)

    def ring_bytes(self, work: Work) -> int:
        """Of a block's codes that are on their way."""
        return self.warps * self.stages * work.stage_bytes

    def shared_bytes(self, work: Work, values: int) -> int:
        """Dynamic shared memory of a block whose threads store so many values at a time; as in few_codes.cuh."""
        parts = 0 if self.in_place else 2 * 4 * self.warps * work.columns * (TILE + 4)
        share = ceil_div(TILE // values * work.rows, self.cluster)
        gathered = 2 * 4 * self.teams * self.cluster * share * values if self.cluster > 1 else 0
        return self.ring_bytes(work) + self.vector_bytes(work) + parts + gathered


def few_codes_sizes(work: Work, values: int, device: DeviceModel) -> FewCodes | None:
    """The sizes of which the busiest block loads the fewest bytes; None where nothing fits.

    Args:
        work: What threads share.
        values: Results that a thread stores at a time.
        device: The device.
    """
    costs = FewCodesCosts.of(device)

    def cost(sizes: FewCodes) -> tuple[int, int]:
        found = sizes.block_bytes(work, device) + (costs.cluster * sizes.cluster if sizes.cluster > 1 else 0)
        return found, -sizes.stages

    return min(_ways(work, values, device), key=cost, default=None)


def held_beside(sizes: FewCodes, work: Work, values: int, shared_bytes: int, device: DeviceModel) -> FewCodes:
    """The sizes with all steps on their way for which there is room beside a block of the launch ahead.

    As they are where those are not more, or warps have several tiles, or blocks share k.

    Args:
        sizes: Those of `few_codes_sizes`.
        work: What threads share.
        values: Results that a thread stores at a time.
        shared_bytes: Dynamic shared memory of that other block.
        device: The device.
    """
    most = FewCodesCosts.of(device).shared_bytes
    room = min(most, device.core_shared_bytes - shared_bytes - 2 * _KEPT_BYTES)
    if not sizes.may_be_in_place(work, device):
        return sizes
    more = range(sizes.steps(work, device), sizes.stages, -1)
    ways = (replace(sizes, stages=stages, in_place=True) for stages in more)
    return next((found for found in ways if found.shared_bytes(work, values) <= room), sizes)


def _held(cluster: int, device: DeviceModel) -> int:
    """Clusters of so many blocks that run at once, one block on a multiprocessor."""
    return device.cores if cluster == 1 else cluster_cores(device)[cluster] // cluster


def _ways(work: Work, values: int, device: DeviceModel) -> Iterator[FewCodes]:
    """At least as many warps as vectors, which make these ready, and as many more as shorten a warp's part of k."""
    costs = FewCodesCosts.of(device)
    for cluster in (1, *([] if work.is_computed else [n for n in cluster_cores(device) if n in (2, 4, 8)])):
        own = ceil_div(work.tiles, _held(cluster, device))  # tiles of a cluster
        teams = ceil_div(own, ceil_div(own, _BARRIERS - 1))
        least, bundles = ceil_div(work.rows, teams), ceil_div(work.bundles, cluster)
        if cluster > 1 and least > work.bundles // cluster:
            continue
        most = max(1, costs.warps[work.bits] // teams)
        warps_k = max(least, ceil_div(bundles, ceil_div(bundles, most)))
        steps = FewCodes(teams, warps_k, 1, cluster).steps(work, device)
        for stages in range(1, min(steps, costs.stages) + 1):
            found = FewCodes(teams, warps_k, stages, cluster)
            if found.shared_bytes(work, values) > costs.shared_bytes:
                break
            yield found
