"""Tiles of products whose operands the copy engine of compute capability 9.0 brings, and which ones to take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf

from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.devices import brings_boxes, cluster_cores, kept_candidates
from cuda_compiler.tiles.tiling import BULK, Asked
from cuda_compiler.tiles.wgmma import LINE, WARPGROUP_ROWS
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.candidates import Candidate, best_candidates
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants, scaling

__all__ = ["BulkCosts", "BulkTile", "BulkTiling", "bulk_candidates", "bulk_clocks", "bulk_tilings"]

_LINE_BYTES, _BARRIER_BYTES = 128, 16
_PANEL = 16  # tiles along m that follow each other before the next ones along n
_ROWS_TOGETHER = 8  # in shared memory, of the pattern that tensor cores expect
_RESERVED_BYTES = 1024  # of shared memory, for each block
_LEAST_STAGES = 2  # one is copied while another is multiplied


@dataclass(frozen=True)
class BulkTile:
    """A tile that may be chosen.

    Attributes:
        rows, columns: Size of a tile along m and n; those of 64 rows are for products that have no more.
        turns: Whether the two multiplying warpgroups have a tile each, so that one stores while the other multiplies;
            else they share the rows of one, or the columns of one of 64 rows.
        splits: Parts of k, each for a block of its own, which form a cluster and add what they have. Such blocks
            compute one tile and take no turns.
        resident: Blocks that a multiprocessor has room for. Where it has two, others are left to the launch behind,
            which begins there; a launch by itself counts as if there were one.
    """

    rows: int
    columns: int
    turns: bool = False
    splits: int = 1
    resident: int = 1


@dataclass(frozen=True)
class BulkTiling(BulkTile):
    """How a product [m, k] by [k, n] is cut up.

    Attributes:
        stages: Tiles of both operands in shared memory at a time.
    """

    stages: int = _LEAST_STAGES

    @classmethod
    def of(cls, tile: BulkTile, device: DeviceModel, m: int) -> BulkTiling:
        """With as many stages for a left matrix of m rows as fit a block's shared memory."""
        room = min(device.shared_bytes, device.core_shared_bytes // tile.resident - _RESERVED_BYTES)
        one = cls(tile.rows, tile.columns, tile.turns, tile.splits, tile.resident, 1)
        return replace(one, stages=room // one.shared_bytes(m))

    @property
    def threads(self) -> int:
        """Of a block: two warpgroups that multiply, and one that copies."""
        return 3 * 128

    def shared_bytes(self, m: int) -> int:
        """Dynamic shared memory of a block for a left matrix of m rows: operands and barriers.

        Products read whole tiles of rows: behind those that are copied, the stage's part of the right matrix.
        """
        lines = max(self.copied_rows(m), self.rows - self.columns) + self.columns
        return self.stages * (lines * _LINE_BYTES + _BARRIER_BYTES)

    def copied_rows(self, m: int) -> int:
        """Rows of a left matrix of m that are copied for a tile: what lies behind the last ones counts for nothing."""
        return min(self.rows, ceil_div(m, _ROWS_TOGETHER) * _ROWS_TOGETHER)

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Tiles along m and n."""
        return ceil(m / self.rows), ceil(n / self.columns)

    @property
    def group_columns(self) -> int:
        """Columns that a warpgroup multiplies at a time."""
        return self.columns // 2 if self.rows == WARPGROUP_ROWS and not self.turns else self.columns

    def blocks(self, tiles: int, device: DeviceModel) -> int:
        """Blocks to launch for each part of k: where they stay, as many as run at once at the most."""
        return tiles if self.splits > 1 else min(device.cores * self.resident, tiles)

    def macros(self, m: int, n: int) -> dict[str, object]:
        """What the kernel's file expects, for a result [m, n]."""
        return {
            "TILE_M": self.rows,
            "TILE_N": self.columns,
            "COPIED_ROWS": self.copied_rows(m),
            "STAGES": self.stages,
            "TURNS": int(self.turns),
            "SPLITS": self.splits,
            "PANEL": _PANEL,
            "RESIDENT": self.resident,
            "WHOLE_ROWS": int(m % self.rows == 0),
            "WHOLE_COLUMNS": int(n % self.columns == 0),
        }


@dataclass(frozen=True)
class BulkCosts(FamilyConstants, family=BULK):
    """The constants of the family.

    Attributes:
        tiles: What may be chosen.
        launch: Clocks from the end of the kernel ahead to the first tile, and from the last one to the end.
        whole_rounds: How much a round that does not fill the device costs, of what it leaves idle.
        step: Clocks that a step along k takes at the least.
        store: Clocks for a result.
        add, add_result: Clocks for blocks to wait for each other, and to add a result.
        memory_bytes: Bytes of the right matrix that arrive from memory a clock.
        core_bytes: Those of them that arrive in a multiprocessor, where blocks share none.
        cache_bytes: Bytes of both that all multiprocessors get from the level-2 cache a clock.
        factored_rows: The most rows at which factors of whole rows wait for epilogues, in place of a launch for a norm;
            0 for none.
    """

    tiles: tuple[BulkTile, ...]
    launch: float
    whole_rounds: float
    step: float
    store: float
    add: float
    add_result: float
    memory_bytes: float = scaling("memory_a_clock")
    cache_bytes: float = scaling("cache_a_clock")
    core_bytes: float = inf
    factored_rows: int = 0


def bulk_candidates(asked: Asked, device: DeviceModel) -> Iterator[Candidate[BulkTiling]]:
    """All tiles whose blocks have enough steps; none without the instructions, or of a batch."""
    if not brings_boxes(device) or asked.batch > 1:
        return
    steps, costs = ceil(asked.k / LINE), BulkCosts.of(device)
    for tile in costs.tiles:
        tiling = BulkTiling.of(tile, device, asked.m)
        suits = (tile.rows == WARPGROUP_ROWS) == (asked.m <= WARPGROUP_ROWS)
        if suits and tiling.stages >= _LEAST_STAGES and (tile.splits == 1 or tile.splits * 2 <= steps):
            clocks = bulk_clocks(tiling, costs, asked, device)
            yield Candidate(BULK, tiling, device.microseconds(clocks), WARPGROUPS)


@lru_cache(maxsize=1024)  # a model has the same product in many layers
def bulk_tilings(asked: Asked, device: DeviceModel) -> tuple[BulkTiling, ...]:
    """Tilings of a product that are worth timing, the best by the model of their cost first."""
    best = best_candidates(bulk_candidates(asked, device), kept_candidates(device, bulk=True))
    return tuple(candidate.sizes for candidate in best)


def bulk_clocks(
    tiling: BulkTiling, costs: BulkCosts, asked: Asked, device: DeviceModel, least_step: float = 0.0
) -> float:
    """Clocks that a product takes: rounds of tiles, bound by shared memory or products, and their stores.

    Args:
        tiling: How it is cut up.
        costs: The family's constants.
        asked: The product.
        device: The device.
        least_step: Clocks that a step along k takes at the least, where more than copies has to be done for it.
    """
    cores = cluster_cores(device)[tiling.splits] if tiling.splits > 1 else device.cores
    average = max(1.0, asked.tiles(tiling.rows, tiling.columns) * tiling.splits / cores)
    rounds = costs.whole_rounds * ceil(average) + (1 - costs.whole_rounds) * average
    results = tiling.rows * tiling.columns
    alone = tiling.columns * _LINE_BYTES / costs.core_bytes if asked.m <= tiling.rows else 0
    step = max(_step(tiling), costs.step, least_step, alone)
    products = step * ceil(ceil(asked.k / LINE) / tiling.splits)
    stored = costs.store * results * (2 if tiling.turns else 1)  # by half of the warps where they take turns
    each = max(products, (products + stored) / 2) if tiling.turns else products
    sides = min(tiling.rows, asked.m) + tiling.columns
    copied = 2 * asked.tiles(tiling.rows, tiling.columns) * sides * asked.k / costs.cache_bytes
    clocks = costs.launch + max(rounds * each, copied, 2 * asked.n * asked.k / costs.memory_bytes)
    if tiling.turns:
        return clocks + stored  # the last tile's alone
    added = costs.add + costs.add_result * results if tiling.splits > 1 else 0
    return clocks + rounds * stored + added


def _step(tiling: BulkTiling) -> float:
    """Clocks of a step along k: shared memory takes and gives a line a clock, tensor cores multiply 32 lines by one."""
    written = tiling.rows + tiling.columns
    read = tiling.rows * tiling.columns / tiling.group_columns + tiling.rows / WARPGROUP_ROWS * tiling.columns
    return max(written + read, tiling.rows * tiling.columns / 32)
