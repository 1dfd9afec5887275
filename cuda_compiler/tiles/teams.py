"""Tiles multiplied by teams of warpgroups while a warpgroup of its own copies; compute capability 9.0 alone does it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.devices import offers
from cuda_compiler.tiles.tiling import TEAMS, Asked, Tiling
from cuda_compiler.tiles.wgmma import LINE, warpgroup_product
from npu_compiler.dtypes import DType
from npu_compiler.lowering.anchors import Epilogue
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.records import changed

__all__ = ["TeamCosts", "TeamTile", "TeamTiling", "as_type", "team_candidates", "team_clocks"]

_BARRIER_BYTES = 16  # of a stage


@dataclass(frozen=True)
class TeamTiling(Tiling):
    """Tiles that teams of warps take in turns.

    Attributes:
        teams: How many there are; a tile is shared by the warpgroups of a team.
    """

    teams: int = 1
    requires = WARPGROUPS
    files = (
        *("tensor_cores.cuh", "warpgroups.cuh", "barriers.cuh", "ring.cuh"),
        *("tile.cuh", "tile_results.cuh", "tile_teams.cuh"),
    )

    @property
    def threads(self) -> int:
        """Those of all teams, and of the warpgroup that copies."""
        return 32 * (self.warps_m * self.warps_n * self.teams + 4)

    @property
    def shared_bytes(self) -> int:
        """Operands and barriers."""
        return self.operand_bytes + _BARRIER_BYTES * self.stages

    def grid(self, tiles: int, device: DeviceModel) -> int:
        """Blocks that stay, each for several tiles."""
        return min(tiles, device.cores * self.blocks)

    def neighbours(self, dtype: DType) -> int:
        """Of results of a byte a thread stores 16, where four of them have a row of 64."""
        return 16 if dtype.size == 1 and self.columns % 64 == 0 else super().neighbours(dtype)

    def functions(self, dtype: str) -> str:
        return warpgroup_product(self.columns // self.warps_n, dtype)

    def epilogue(self, fused: Epilogue) -> Epilogue:
        return as_type("OwnEpilogue", fused)

    def macros(self, results: int, steps: int, panel: int = 1) -> dict[str, object]:
        return {**super().macros(results, steps, panel), "TEAMS": self.teams}


def as_type(name: str, fused: Epilogue) -> Epilogue:
    """An epilogue whose functions are those of a type, as tile_results.cuh calls them."""
    return changed(fused, text=f"struct {name} {{\n{fused.text}\n}};")


@dataclass(frozen=True)
class TeamTile:
    """A tile that may be chosen.

    Attributes:
        groups: Warpgroups of a team.
        products: 16-bit multiply-adds of a multiprocessor a clock.
    """

    rows: int
    columns: int
    groups: int
    teams: int
    stages: int
    products: int

    @property
    def tiling(self) -> TeamTiling:
        """How a product is cut into such tiles."""
        return TeamTiling(self.rows, self.columns, LINE, 4 * self.groups, 1, self.stages, blocks=1, teams=self.teams)


@dataclass(frozen=True)
class TeamCosts(FamilyConstants, family=TEAMS):
    """The constants of the family.

    Attributes:
        tiles: What may be chosen.
        launch: Clocks from the end of the kernel ahead to the first tile, and from the last one to the end.
        step: Clocks that a step along k takes at the least.
        store: Clocks of a team for a result.
        operation: Clocks of a team for each operation on a result that is one of more than `few_operations`.
        column_rows: How many rows such results would take as long as fetching what is the same for all rows.
        result: Clocks of the multiprocessor for a result, which teams cannot share.
        late_byte: Clocks for a byte that the epilogue reads and that no register waits for.
        held: Results of a thread whose operands are fetched ahead.
        stored_bytes: Bytes that are stored of a result, mostly.
        copy_bytes: Bytes that a multiprocessor copies into shared memory a clock.
    """

    tiles: tuple[TeamTile, ...]
    launch: float
    step: float
    store: float
    result: float
    late_byte: float
    held: int
    stored_bytes: float
    copy_bytes: float
    operation: float
    few_operations: int
    column_rows: int


def team_candidates(asked: Asked, device: DeviceModel) -> Iterator[Candidate[Tiling]]:
    """All tiles, those of few rows first; none without the instructions."""
    if not offers(device, WARPGROUPS):
        return
    costs = TeamCosts.of(device)
    for tile in sorted(costs.tiles, key=lambda tile: tile.rows):
        tiling = tile.tiling
        if tiling.shared_bytes <= device.shared_bytes:
            clocks = team_clocks(tiling, tile, costs, asked, device)
            yield Candidate(TEAMS, tiling, device.microseconds(clocks), tiling.requires)


def team_clocks(tiling: TeamTiling, tile: TeamTile, costs: TeamCosts, asked: Asked, device: DeviceModel) -> float:
    """Clocks that a product takes: rounds of tiles that are bound by products, by one team's turns or by copies."""
    size, steps = tiling.rows * tiling.columns, ceil(asked.k / LINE)
    tiles = asked.tiles(tiling.rows, tiling.columns)
    products, stores = steps * max(costs.step, size * LINE / tile.products), size * costs.store
    operation = max(0, asked.operations - costs.few_operations) * costs.operation
    stores += (tiling.rows + costs.column_rows) * tiling.columns * operation
    copies = steps * (tiling.rows + tiling.columns) * LINE * 2 / costs.copy_bytes
    threads = 32 * tiling.warps_m
    late = max(0, size - costs.held * threads) * max(0.0, asked.moved - costs.stored_bytes) * costs.late_byte
    each = max(products, (products + stores) / tiling.teams, copies + size * costs.result) + late
    last = max(products, copies) + stores + late
    return costs.launch + (ceil(tiles / device.cores) - 1) * each + last
