"""Choosing the tile of a matrix product, with no GPU at hand: a model of what each candidate costs.

The model's numbers were fitted to the times of all candidates on the convolutions of ResNet-50 at four batch sizes, on
one NVIDIA H200; there it is off by a tenth on average. Elsewhere it only ranks the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

__all__ = ["CANDIDATES", "MULTIPROCESSORS", "Tiling", "choose_tiling"]


@dataclass(frozen=True)
class Tiling:
    """How a matrix product [m, k] by [k, n] is cut up.

    Attributes:
        rows, columns, depth: Size of a tile along m, n and k.
        warps_m, warps_n: How a block's warps share the results.
        stages: Tiles in shared memory at a time.
        blocks: Blocks that should fit a multiprocessor: the compiler limits registers for them.
        splits: Blocks that share one tile of results, each with a part of k.
    """

    rows: int
    columns: int
    depth: int
    warps_m: int
    warps_n: int
    stages: int
    blocks: int
    splits: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; at most the 64 KiB that every GPU of compute capability 7.0 and up has."""
        return self.stages * (self.rows + self.columns) * self.depth * 2

    def macros(self, results: int) -> dict[str, object]:
        """What `tile.cuh` expects; `results` is the number of tiles that the whole result has."""
        return {
            "TILE_M": self.rows,
            "TILE_N": self.columns,
            "TILE_K": self.depth,
            "WARPS_M": self.warps_m,
            "WARPS_N": self.warps_n,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
            "SPLITS": self.splits,
            "RESULT_TILES": results,
        }


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


def choose_tiling(m: int, n: int, k: int, batch: int) -> Tiling:
    """The cheapest of all candidates for a product [m, k] by [k, n], `batch` times."""
    costs = ((_clocks(tiling, cost, m, n, k, batch), tiling) for tiling, cost in _variants(k))
    return min(costs, key=lambda pair: (pair[0], pair[1].splits, pair[1].rows))[1]


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
