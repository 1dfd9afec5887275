"""Tiles whose common dimension several blocks share, multiplied by warpgroups, which only compute capability 9.0 has.

What a tiling costs was fitted to 3,000 times of candidates on the convolutions of ResNet-50 at four batch sizes and on
the products of a language model of 1.5 billion parameters at 128 to 2048 rows, on one NVIDIA H200. Against those times,
its choices take 4 to 6 % longer than the best candidates in sum at batches of 8 and more, and none longer at 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from cuda_compiler.tiles.tiling import MULTIPROCESSORS, Tiling

__all__ = ["CLUSTER_CANDIDATES", "ranked_cluster_tilings"]

_ROWS = 64  # that a warpgroup multiplies at a time
_DEPTH = 64  # of a tile: lines of 128 bytes


@dataclass(frozen=True)
class _Cost:
    """16-bit multiply-adds of a multiprocessor a clock, and the least clocks that a step along k takes a block."""

    products: int
    step: int = 400


def _tiling(rows: int, columns: int, stages: int, blocks: int) -> Tiling:
    """Each warpgroup multiplies 64 rows, or 128 where there are 256."""
    warps = 4 if rows == _ROWS else 8
    return Tiling(rows, columns, _DEPTH, warps, 1, stages, blocks, by_warpgroups=True)


CLUSTER_CANDIDATES = {
    _tiling(128, 256, 4, 1): _Cost(1906),
    _tiling(256, 128, 4, 1): _Cost(1681),
    _tiling(128, 192, 5, 1): _Cost(1725),
    _tiling(128, 160, 6, 1): _Cost(1620),
    _tiling(128, 128, 6, 1): _Cost(1598),
    _tiling(128, 96, 7, 1): _Cost(1512),
    _tiling(128, 96, 4, 2): _Cost(1384),
    _tiling(128, 64, 8, 1): _Cost(1348),
    _tiling(128, 64, 4, 2): _Cost(1348),
    _tiling(64, 128, 4, 2): _Cost(1090),
    _tiling(64, 64, 6, 2): _Cost(1348, 307),
    _tiling(64, 64, 4, 3): _Cost(1348, 332),
    _tiling(64, 32, 4, 4): _Cost(1348, 305),
}
_USABLE = {
    2: 132,
    3: 126,
    4: 120,
    6: 120,
    8: 112,
}  # multiprocessors that clusters of a size can fill

_LAUNCH = 1248  # clocks from the end of the kernel ahead to the first block, and from the last block to the end
_START = 335  # clocks from the launch of a block to its first product
_STORE_ALONE, _STORE = 0.1748, 0.1256  # clocks for a result, of one block and of several that share a multiprocessor
_SPLIT, _SPLIT_RESULT = 1655, 0.1934  # clocks for blocks to wait for each other, and to add a result
_COPY_BYTES = 53.3  # that a multiprocessor copies into shared memory a clock
_CACHE_BYTES = 7724  # that all multiprocessors move through the level-2 cache a clock
_MEMORY_BYTES = 4447  # of stored results and weights that device memory moves a clock
_MARGIN = 0.9  # tiles for warps are mostly faster than the model of their own cost says


def ranked_cluster_tilings(m: int, n: int, k: int, batch: int, moved: float) -> list[tuple[float, Tiling]]:
    """All candidates after the clocks that they take, as `ranked_tilings` counts them; the best first.

    Args:
        m, n, k, batch: A product [m, k] by [k, n], `batch` times.
        moved: Bytes that the epilogue reads and stores for each of the product's results.
    """
    costs = [(_clocks(tiling, cost, m, n, k, batch, moved) / _MARGIN, tiling) for tiling, cost in _variants(k)]
    return sorted(costs, key=lambda pair: (pair[0], pair[1].splits, pair[1].rows))


def _variants(k: int) -> Iterator[tuple[Tiling, _Cost]]:
    """All candidates, with no more tiles on their way than a block has steps."""
    for base, cost in CLUSTER_CANDIDATES.items():
        for splits in _USABLE:
            steps = ceil(ceil(k / _DEPTH) / splits)
            if splits * 2 <= ceil(k / _DEPTH):
                yield replace(base, stages=min(base.stages, max(steps, 3 if steps > 2 else 1)), splits=splits), cost


def _clocks(tiling: Tiling, cost: _Cost, m: int, n: int, k: int, batch: int, moved: float) -> float:
    size, sides = tiling.rows * tiling.columns, tiling.rows + tiling.columns
    blocks = ceil(m / tiling.rows) * ceil(n / tiling.columns) * batch * tiling.splits
    steps, usable = ceil(ceil(k / _DEPTH) / tiling.splits), _USABLE[tiling.splits]
    stored = moved * MULTIPROCESSORS / _MEMORY_BYTES
    step = max(size * _DEPTH / cost.products, sides * _DEPTH * 2 / _COPY_BYTES)

    def wave(resident: int) -> float:
        alone = steps * max(cost.step, step) + (_STORE_ALONE + stored) * size
        return _START + max(alone, resident * (steps * step + (_STORE + stored) * size))

    full, rest = divmod(blocks, usable * tiling.blocks)
    clocks = full * wave(tiling.blocks) + (wave(ceil(rest / usable)) if rest else 0)
    results = m * n * batch * moved
    loads = blocks * sides * min(steps * _DEPTH, k) * 2
    clocks = max(clocks, (loads + results) / _CACHE_BYTES, (n * k * batch * 2 + results) / _MEMORY_BYTES)
    return _LAUNCH + clocks + _SPLIT + size * _SPLIT_RESULT
