"""Tiles multiplied by teams of warpgroups while a warpgroup of its own copies; only compute capability 9.0 does that.

What a tiling costs was fitted to 770 times of candidates in their places in ResNet-50 at four batch sizes, on one
NVIDIA H200. Against those times its choices take up to 4 % longer than the best candidates in sum, and the best of the
close ones 0.5 %.
"""

from __future__ import annotations

from math import ceil

from cuda_compiler.tiles.tiling import MULTIPROCESSORS, Tiling

__all__ = ["TEAM_CANDIDATES", "ranked_team_tilings"]

_ROWS = 64  # that a warpgroup multiplies at a time
_DEPTH = 64  # of a tile: lines of 128 bytes


def _tiling(rows: int, columns: int, groups: int, teams: int, stages: int) -> Tiling:
    """A tile is shared by the warpgroups of a team."""
    return Tiling(rows, columns, _DEPTH, 4 * groups, 1, stages, 1, by_warpgroups=True, teams=teams)


TEAM_CANDIDATES = {  # 16-bit multiply-adds of a multiprocessor a clock
    _tiling(128, 256, 2, 1, 4): 2000,
    _tiling(256, 128, 2, 1, 4): 1800,
    _tiling(256, 64, 2, 1, 5): 1270,
    _tiling(128, 192, 2, 1, 5): 1725,
    _tiling(128, 160, 2, 1, 6): 1620,
    _tiling(128, 96, 2, 1, 7): 1512,
    _tiling(128, 128, 2, 1, 7): 1375,
    _tiling(128, 128, 1, 2, 7): 1300,
    _tiling(64, 256, 1, 2, 5): 1835,
    _tiling(64, 128, 1, 2, 8): 1820,
    _tiling(128, 64, 1, 3, 8): 835,
    _tiling(64, 64, 1, 3, 8): 1750,
    _tiling(64, 32, 1, 3, 8): 1700,
}

_LAUNCH = 1418  # clocks from the end of the kernel ahead to the first tile, and from the last one to the end
_STEP = 265  # clocks that a step along k takes at the least
_STORE = 0.1745  # clocks of a team for a result
_RESULT = 0.13  # clocks of the multiprocessor for a result, which teams cannot share
_LATE_BYTE = 0.126  # clocks for a byte that the epilogue reads and that no register waits for
_HELD = 64  # results of a thread whose operands are fetched ahead
_STORED_BYTES = 2  # of a result, mostly
_COPY_BYTES = 56.5  # that a multiprocessor copies into shared memory a clock


def ranked_team_tilings(m: int, n: int, k: int, batch: int, moved: float) -> list[tuple[float, Tiling]]:
    """All candidates after the clocks that they take, as `ranked_tilings` counts them; the best first.

    Args:
        m, n, k, batch: A product [m, k] by [k, n], `batch` times.
        moved: Bytes that the epilogue reads and stores for each of the product's results.
    """
    costs = [(_clocks(tiling, rate, m, n, k, batch, moved), tiling) for tiling, rate in TEAM_CANDIDATES.items()]
    return sorted(costs, key=lambda pair: (pair[0], pair[1].rows))


def _clocks(tiling: Tiling, rate: int, m: int, n: int, k: int, batch: int, moved: float) -> float:
    size, steps = tiling.rows * tiling.columns, ceil(k / _DEPTH)
    tiles = ceil(m / tiling.rows) * ceil(n / tiling.columns) * batch
    products, stores = steps * max(_STEP, size * _DEPTH / rate), size * _STORE
    copies = steps * (tiling.rows + tiling.columns) * _DEPTH * 2 / _COPY_BYTES
    threads = 32 * tiling.warps_m
    late = max(0, size - _HELD * threads) * max(0.0, moved - _STORED_BYTES) * _LATE_BYTE
    each = max(products, (products + stores) / tiling.teams, copies + size * _RESULT) + late
    last = max(products, copies) + stores + late
    return _LAUNCH + (ceil(tiles / MULTIPROCESSORS) - 1) * each + last
