"""How threads share a product of 2 to 16 rows by codes that come through shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from cuda_compiler.devices import cluster_cores
from cuda_compiler.products.integer_rows_sizes import BUNDLE, TILE, Work
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel

__all__ = ["FewCodes", "few_codes_sizes"]


@dataclass(frozen=True)
class FewCodes:
    """How threads share the work.

    Attributes:
        teams: Sets of warps of a block that have a tile each.
        warps_k: Warps of a team, which share k.
        stages: Steps that each warp has on their way.
        cluster: Blocks that share k.
        resident: Blocks of a multiprocessor.
        early: Of the stages those that are asked for ahead of the vectors; 0 for all.
    """

    teams: int
    warps_k: int
    stages: int
    cluster: int = 1
    resident: int = 1
    early: int = 0

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.teams * self.warps_k

    def clusters(self, work: Work, device: DeviceModel) -> int:
        """Clusters that the launch has; of one block each where there are none."""
        held = device.cores if self.cluster == 1 else cluster_cores(device)[self.cluster]
        teams = 1 if self.cluster == 1 else self.teams  # tiles go to blocks first
        return min(ceil_div(work.tiles, teams), held * self.resident // self.cluster)

    def shared_bytes(self, work: Work, rows: int, values: int) -> int:
        """Dynamic shared memory of a block whose threads store so many values at a time; as in few_codes.cuh."""
        columns = 8 * ceil_div(rows, 8)
        units = ceil_div(work.bundles, self.cluster) * BUNDLE
        vectors = 2 * rows * (units * work.unit + (32 if work.bits == 4 else 16))
        parts = 2 * 4 * self.warps * columns * (TILE + 4)
        share = ceil_div(TILE // values * rows, self.cluster)
        gathered = 2 * 4 * self.teams * self.cluster * share * values if self.cluster > 1 else 0
        sums = 4 * rows * max(1, self.warps // rows)
        return self.warps * self.stages * work.stage_bytes + vectors + parts + gathered + sums


def few_codes_sizes(work: Work, rows: int, values: int, device: DeviceModel) -> FewCodes | None:
    """The sizes that should be the quickest; None where nothing fits."""
    if work.k > 4000:
        return FewCodes(7, 2, 2, 8)
    return FewCodes(1, 8, 1) if work.tiles <= 132 else FewCodes(8, 2, 2)
