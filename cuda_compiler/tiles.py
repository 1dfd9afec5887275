"""Choosing the tile of a matrix product, with no GPU at hand: a model of what each candidate costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

__all__ = ["MULTIPROCESSORS", "Tiling", "choose_tiling"]

MULTIPROCESSORS = 132  # of the GPU that the model was fitted on; the choice only ranks candidates
_PRODUCTS_PER_CLOCK = 1200  # 16-bit multiply-adds that a multiprocessor does
_BYTES_PER_CLOCK = 56  # that a multiprocessor gets from the level-2 cache
_START_CLOCKS = 2200  # from the launch of a block to its first product, and from its last to the stored result
_THREADS = 512  # of a multiprocessor, for kernels that need this many registers
_STEP_CLOCKS = 260  # the least that one step along the common dimension takes a block
_SPLIT_CLOCKS = 1400  # for the blocks of one tile to find out which is the last
_SHARED = 227 * 1024  # bytes of shared memory that a multiprocessor has for its blocks


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


_CANDIDATES = (
    Tiling(128, 128, 32, 2, 2, 4, 2),
    Tiling(128, 128, 32, 2, 4, 4, 2),
    Tiling(128, 64, 32, 2, 2, 4, 4),
    Tiling(64, 128, 32, 2, 2, 4, 3),
    Tiling(64, 64, 64, 2, 2, 4, 4),
    Tiling(64, 32, 64, 2, 2, 4, 4),
    Tiling(32, 64, 64, 2, 2, 4, 4),
    Tiling(32, 32, 64, 2, 2, 4, 4),
)
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def choose_tiling(m: int, n: int, k: int, batch: int) -> Tiling:
    """The cheapest of all candidates for a product [m, k] by [k, n], `batch` times."""
    return min(_variants(k), key=lambda tiling: (_clocks(tiling, m, n, k, batch), tiling.splits, tiling.rows))


def _variants(k: int) -> Iterator[Tiling]:
    for base in _CANDIDATES:
        steps = -(-k // base.depth)
        for splits in _SPLITS:
            if splits == 1 or splits * 2 <= steps:
                stages = max(2, min(base.stages, ceil(steps / splits) + 1))
                yield replace(base, stages=stages, splits=splits)


def _clocks(tiling: Tiling, m: int, n: int, k: int, batch: int) -> float:
    tiles = -(-m // tiling.rows) * -(-n // tiling.columns) * batch
    blocks = tiles * tiling.splits
    steps = ceil(ceil(k / tiling.depth) / tiling.splits)
    products = tiling.rows * tiling.columns * tiling.depth / _PRODUCTS_PER_CLOCK
    loads = (tiling.rows + tiling.columns) * tiling.depth * 2 / _BYTES_PER_CLOCK
    on_one = -(-blocks // MULTIPROCESSORS)
    resident = max(1, min(_SHARED // tiling.shared_bytes, _THREADS // tiling.threads))
    busy = on_one * steps * max(products, loads)
    waiting = -(-on_one // resident) * (_START_CLOCKS + steps * _STEP_CLOCKS)
    total = max(busy + _START_CLOCKS, waiting)
    if tiling.splits > 1:
        partial = tiling.rows * tiling.columns * 4
        total += _SPLIT_CLOCKS + (tiling.splits + 1) * partial / _BYTES_PER_CLOCK
    return total
