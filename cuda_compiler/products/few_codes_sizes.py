"""How threads share a product of 2 to 16 rows by codes that come through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cuda_compiler.devices import cluster_cores
from cuda_compiler.products.integer_rows_sizes import BUNDLE, TILE, Work
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants

__all__ = ["FewCodes", "FewCodesCosts", "few_codes_sizes"]

_BARRIERS = 16  # of a block, one of which all threads share


@dataclass(frozen=True)
class FewCodesCosts(FamilyConstants, family="few_codes"):
    """What decides how threads share the work.

    Attributes:
        warps: Of a block, at the most.
        ring_bytes: Of a block's codes that are on their way, at the most.
        shared_bytes: Of a block at the most.
        cluster: What it costs blocks to put their parts of a tile together, in bytes that a block loads meanwhile.
    """

    warps: int
    ring_bytes: int
    shared_bytes: int
    cluster: int


@dataclass(frozen=True)
class FewCodes:
    """How threads share the work.

    Attributes:
        teams: Sets of warps of a block that have a tile each.
        warps_k: Warps of a team, which share k.
        stages: Steps that each warp has on their way.
        cluster: Blocks that share k.
        early: Of the stages those that are asked for ahead of the vectors; 0 for all.
    """

    teams: int
    warps_k: int
    stages: int
    cluster: int = 1
    early: int = 0

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.teams * self.warps_k

    def clusters(self, work: Work, device: DeviceModel) -> int:
        """Clusters that the launch has; of one block each where there are none."""
        held = device.cores if self.cluster == 1 else cluster_cores(device)[self.cluster] // self.cluster
        return min(ceil_div(work.tiles, 1 if self.cluster == 1 else self.teams), held)

    def turns(self, work: Work, device: DeviceModel) -> int:
        """Tiles of a team."""
        return ceil_div(work.tiles, self.clusters(work, device) * self.teams)

    def bundles(self, work: Work) -> int:
        """Of a row, those of a block at the most."""
        return ceil_div(work.bundles, self.cluster)

    def vector_bytes(self, work: Work, rows: int) -> int:
        """Of the vectors in a block."""
        return 2 * rows * (self.bundles(work) * BUNDLE * work.unit + (32 if work.bits == 4 else 16))

    def block_bytes(self, work: Work, rows: int, device: DeviceModel) -> int:
        """That the busiest block loads."""
        steps = self.turns(work, device) * self.teams * ceil_div(self.bundles(work), work.step)
        return steps * work.stage_bytes + self.vector_bytes(work, rows)

    def shared_bytes(self, work: Work, rows: int, values: int) -> int:
        """Dynamic shared memory of a block whose threads store so many values at a time; as in few_codes.cuh."""
        parts = 2 * 4 * self.warps * 8 * ceil_div(rows, 8) * (TILE + 4)
        share = ceil_div(TILE // values * rows, self.cluster)
        gathered = 2 * 4 * self.teams * self.cluster * share * values if self.cluster > 1 else 0
        sums = 4 * rows * max(1, self.warps // rows)
        return self.warps * self.stages * work.stage_bytes + self.vector_bytes(work, rows) + parts + gathered + sums


def few_codes_sizes(work: Work, rows: int, values: int, device: DeviceModel) -> FewCodes | None:
    """The sizes of which the busiest block loads the fewest bytes; None where nothing fits.

    Args:
        work: What threads share.
        rows: Of the vectors.
        values: Results that a thread stores at a time.
        device: The device.
    """
    costs = FewCodesCosts.of(device)

    def cost(sizes: FewCodes) -> tuple[int, int, int]:
        found = sizes.block_bytes(work, rows, device) + (costs.cluster if sizes.cluster > 1 else 0)
        return found, -sizes.warps, -sizes.stages

    return min(_ways(work, rows, values, device), key=cost, default=None)


def _ways(work: Work, rows: int, values: int, device: DeviceModel) -> Iterator[FewCodes]:
    costs = FewCodesCosts.of(device)
    for cluster in (1, *([] if work.computed else [n for n in cluster_cores(device) if n in (2, 4, 8)])):
        held = device.cores if cluster == 1 else cluster_cores(device)[cluster] // cluster
        own = ceil_div(work.tiles, held)  # tiles of a cluster
        teams = ceil_div(own, ceil_div(own, min(costs.warps, _BARRIERS - 1)))
        for warps_k in range(1, min(max(1, costs.warps // teams), work.bundles // cluster) + 1):
            one = FewCodes(teams, warps_k, 1, cluster)
            steps = one.turns(work, device) * ceil_div(ceil_div(one.bundles(work), warps_k), work.step)
            for stages in range(1, steps + 1):
                found = FewCodes(teams, warps_k, stages, cluster)
                ring = found.warps * stages * work.stage_bytes
                if found.shared_bytes(work, rows, values) > costs.shared_bytes or ring > costs.ring_bytes:
                    break
                yield found
