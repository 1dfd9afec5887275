"""Tiles multiplied by teams of warpgroups while a warpgroup of its own copies; only compute capability 9.0 does that.

What a tiling costs was fitted to 1,500 times of candidates in their places in ResNet-50 at four batch sizes, on one
NVIDIA H200.
"""

from __future__ import annotations

from math import ceil

from cuda_compiler.tiles import MULTIPROCESSORS, Tiling

__all__ = ["TEAM_CANDIDATES", "ranked_team_tilings"]

_ROWS = 64  # that a warpgroup multiplies at a time
_DEPTH = 64  # of a tile: lines of 128 bytes


def _tiling(rows: int, columns: int, groups: int, teams: int, stages: int) -> Tiling:
    """A tile is shared by the warpgroups of a team."""
    return Tiling(rows, columns, _DEPTH, 4 * groups, 1, stages, 1, by_warpgroups=True, teams=teams)


TEAM_CANDIDATES = {  # 16-bit multiply-adds of a multiprocessor a clock
    _tiling(128, 256, 2, 1, 4): 1900,
    _tiling(256, 128, 2, 1, 4): 1900,
    _tiling(256, 64, 2, 1, 5): 1600,
    _tiling(128, 128, 2, 1, 7): 1500,
    _tiling(128, 128, 1, 2, 7): 1500,
    _tiling(64, 256, 1, 2, 5): 1700,
    _tiling(64, 128, 1, 3, 8): 1700,
    _tiling(128, 64, 1, 3, 8): 1700,
    _tiling(64, 64, 1, 3, 8): 1700,
    _tiling(64, 32, 1, 3, 8): 1700,
}

_LAUNCH = 1248  # clocks from the end of the kernel ahead to the first tile, and from the last one to the end
_STORE = 0.154  # clocks of a team for a result
_LAST_BYTES = 104.0  # of operands and results of the epilogue that the last tile of a multiprocessor moves a clock
_COPY_BYTES = 53.2  # that a multiprocessor moves to and from the level-2 cache a clock
_CACHE_BYTES = 6065  # that all of them move a clock
_MEMORY_BYTES = 2227  # of stored results and weights that device memory moves a clock


def ranked_team_tilings(m: int, n: int, k: int, batch: int, moved: float) -> list[tuple[float, Tiling]]:
    """All candidates after the clocks that they take, as `ranked_tilings` counts them; the best first.

    Args:
        m, n, k, batch: A product [m, k] by [k, n], `batch` times.
        moved: Bytes that the epilogue reads and stores for each of the product's results.
    """
    costs = [(_clocks(tiling, rate, m, n, k, batch, moved), tiling) for tiling, rate in TEAM_CANDIDATES.items()]
    return sorted(costs, key=lambda pair: (pair[0], pair[1].rows))


def _clocks(tiling: Tiling, rate: int, m: int, n: int, k: int, batch: int, moved: float) -> float:
    size, sides, steps = tiling.rows * tiling.columns, tiling.rows + tiling.columns, ceil(k / _DEPTH)
    tiles = ceil(m / tiling.rows) * ceil(n / tiling.columns) * batch
    products, stores = steps * size * _DEPTH / rate, size * _STORE
    copies = steps * sides * _DEPTH * 2
    each = max((products + stores) / tiling.teams, products, (copies + size * moved) / _COPY_BYTES)
    last = max(products, copies / _COPY_BYTES) + stores + size * moved / _LAST_BYTES
    clocks = (ceil(tiles / MULTIPROCESSORS) - 1) * each + last
    results = m * n * batch * moved
    clocks = max(clocks, (tiles * copies + results) / _CACHE_BYTES, (n * k * batch * 2 + results) / _MEMORY_BYTES)
    return _LAUNCH + clocks
