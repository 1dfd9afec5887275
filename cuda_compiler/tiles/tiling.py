"""Choosing the tile of a matrix product, with no GPU at hand: a model of what each candidate costs.

The model's numbers were fitted to the times of all candidates on the convolutions of ResNet-50 at four batch sizes, on
one NVIDIA H200; there it is off by a tenth on average. Elsewhere it only ranks the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from npu_compiler.integers import ceil_div

__all__ = ["CANDIDATES", "MULTIPROCESSORS", "Tiling", "ranked_tilings"]


@dataclass(frozen=True)
class Tiling:
    """How a matrix product [m, k] by [k, n] is cut up.

    Attributes:
        rows, columns, depth: Size of a tile along m, n and k.
        warps_m, warps_n: How a block's warps, or those of a team, share the results.
        stages: Tiles in shared memory at a time.
        blocks: Blocks that should fit a multiprocessor: the compiler limits registers for them.
        splits: Blocks that share one tile of results, each with a part of k.
        by_warpgroups: Whether four warps multiply together, as compute capability 9.0 can.
        teams: Groups of warps that take tiles of results in turns while a warpgroup of its own copies; none where all
            warps of a block share one tile, which they also copy.
    """

    rows: int
    columns: int
    depth: int
    warps_m: int
    warps_n: int
    stages: int
    blocks: int
    splits: int = 1
    by_warpgroups: bool = False
    teams: int = 0

    @property
    def threads(self) -> int:
        """Of a block."""
        warps = self.warps_m * self.warps_n
        return 32 * (warps * self.teams + 4 if self.teams else warps)

    def grid(self, tiles: int) -> int:
        """Blocks for so many tiles of results, one split each."""
        return min(tiles, MULTIPROCESSORS * self.blocks) if self.teams else tiles

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: operands and the barriers of teams, or later results brought into rows."""
        operands = self.stages * (self.rows + self.columns) * self.depth * 2
        return operands + 16 * self.stages if self.teams else max(operands, self._staging_bytes)

    @property
    def _staging_bytes(self) -> int:
        """A whole tile where a cluster adds; else 16 rows of at most 64 columns for each warp; rows 4 floats apart."""
        if self.clustered:
            return self.rows * (self.columns + 4) * 4
        columns = self.columns // self.warps_n
        at_a_time = next((width for width in (64, 32) if columns % width == 0), 16)
        return self.warps_m * self.warps_n * 16 * (at_a_time + 4) * 4

    @property
    def clustered(self) -> bool:
        """Whether the blocks that share a tile form a cluster, and so need no memory for their parts."""
        return self.by_warpgroups and not self.teams

    @property
    def files(self) -> tuple[str, ...]:
        """The kernel files that multiply and store such tiles."""
        if self.teams:
            return "tensor_cores.cuh", "warpgroups.cuh", "tile.cuh", "tile_results.cuh", "tile_teams.cuh"
        if self.clustered:
            return (
                *("tensor_cores.cuh", "warpgroups.cuh", "tile.cuh"),
                *("tile_warpgroups.cuh", "tile_cluster.cuh", "tile_once.cuh"),
            )
        return "tensor_cores.cuh", "tile.cuh", "tile_warps.cuh", "tile_store.cuh", "tile_once.cuh"

    def macros(self, results: int, steps: int, panel: int = 1) -> dict[str, object]:
        """What the files expect.

        Args:
            results: Tiles of the whole result.
            steps: Tiles along k.
            panel: Tiles along m that follow each other before the next ones along n.
        """
        ahead = {"AHEAD": self.ahead(ceil_div(steps, self.splits))} if self.clustered else {}
        return {
            **ahead,
            "TEAMS": self.teams,
            "PANEL": panel,
            "TILE_M": self.rows,
            "TILE_N": self.columns,
            "TILE_K": self.depth,
            "WARPS_M": self.warps_m,
            "WARPS_N": self.warps_n,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
            "SPLITS": self.splits,
            "SHARED_BYTES": self.shared_bytes,
            "RESULT_TILES": results,
        }

    def panel(self, tiles_m: int, tiles_n: int) -> int:
        """Tiles along m that should follow each other, so that tiles computed at a time read as little as they can."""
        at_a_time = MULTIPROCESSORS * self.blocks
        height = max(1, min(tiles_m, round((at_a_time * self.columns / self.rows) ** 0.5)))
        return height if tiles_n * height > at_a_time else 1

    def ahead(self, steps: int) -> int:
        """Tiles of a block that are copied before the first is multiplied, of `steps`.

        Where shared memory is used again, two tiles may still be at work while the next ones are asked for.
        """
        return max(1, steps) if steps <= self.stages else self.stages - 2


@dataclass(frozen=True)
class _Cost:
    """What a multiprocessor needs for a tiling.

    Attributes:
        products: 16-bit multiply-adds a clock.
        step: Clocks that one step along k takes a block at the least.
        resident: Blocks that share the multiprocessor.
    """

    products: int
    step: int
    resident: int


CANDIDATES = {
    Tiling(128, 128, 32, 2, 2, 4, 2): _Cost(805, 252, 2),
    Tiling(128, 128, 32, 2, 4, 4, 2): _Cost(804, 331, 2),
    Tiling(128, 64, 32, 2, 2, 4, 4): _Cost(791, 451, 4),
    Tiling(64, 128, 32, 2, 2, 4, 3): _Cost(811, 467, 3),
    Tiling(64, 64, 64, 2, 2, 4, 4): _Cost(811, 82, 4),
    Tiling(64, 32, 64, 2, 2, 4, 4): _Cost(562, 502, 4),
    Tiling(32, 64, 64, 2, 2, 4, 4): _Cost(562, 423, 4),
    Tiling(32, 32, 64, 2, 2, 4, 4): _Cost(523, 310, 6),
}
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

MULTIPROCESSORS = 132  # of the GPU that static choices have in mind
_START = 2470  # clocks from the launch of a block to its first product
_STORE = 0.2063  # clocks for a result, with each block that shares the multiprocessor
_SPLIT = 3677  # clocks for the blocks of one tile to find out which is the last
_PARTIAL_BYTES = 50.6  # of other blocks' parts that the last one reads a clock
_TRAFFIC_BYTES = 5143  # that all multiprocessors move a clock


def ranked_tilings(m: int, n: int, k: int, batch: int) -> list[tuple[float, Tiling]]:
    """All candidates for a product [m, k] by [k, n], `batch` times, after the clocks that they take; the best first."""
    costs = [(_clocks(tiling, cost, m, n, k, batch), tiling) for tiling, cost in _variants(k)]
    return sorted(costs, key=lambda pair: (pair[0], pair[1].splits, pair[1].rows))


def _variants(k: int) -> Iterator[tuple[Tiling, _Cost]]:
    for base, cost in CANDIDATES.items():
        steps = ceil(k / base.depth)
        for splits in _SPLITS:
            if splits == 1 or splits * 2 <= steps:
                stages = max(2, min(base.stages, ceil(steps / splits) + 1))
                yield replace(base, stages=stages, splits=splits), cost


def _clocks(tiling: Tiling, cost: _Cost, m: int, n: int, k: int, batch: int) -> float:
    size = tiling.rows * tiling.columns
    tiles = ceil(m / tiling.rows) * ceil(n / tiling.columns) * batch
    blocks = tiles * tiling.splits
    steps = ceil(ceil(k / tiling.depth) / tiling.splits)

    def wave(resident: int) -> float:
        products = resident * size * tiling.depth / cost.products
        return _START + _STORE * resident * size + steps * max(cost.step, products)

    full, rest = divmod(blocks, MULTIPROCESSORS * cost.resident)
    clocks = full * wave(cost.resident) + (wave(ceil(rest / MULTIPROCESSORS)) if rest else 0)
    loads = blocks * (tiling.rows + tiling.columns) * min(steps * tiling.depth, k) * 2
    clocks = max(clocks, (loads + tiles * size * 2) / _TRAFFIC_BYTES)
    if tiling.splits > 1:
        clocks += _SPLIT + tiling.splits * size * 4 / _PARTIAL_BYTES
    return clocks
