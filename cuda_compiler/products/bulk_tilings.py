"""Tiles of products whose operands the copy engine of compute capability 9.0 brings, and which ones to take.

What a tiling costs was fitted to 41 times of the products of a language model of 1.5 billion parameters at 128, 512 and
2048 rows, on one NVIDIA H200. There its choices are the best that were timed, or take at most 2 % longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from cuda_compiler.tiles.tiling import MULTIPROCESSORS
from cuda_compiler.tiles.wgmma import SHARED_BYTES

__all__ = ["BULK_CANDIDATES", "LINE", "BulkTiling", "bulk_tilings"]

LINE = 64  # elements of 16 bits: 128 bytes, what is copied and multiplied of a row at a time
_LINE_BYTES, _BARRIER_BYTES = 128, 16
_ROWS = 64  # that a warpgroup multiplies at a time
_PANEL = 16  # tiles along m that follow each other before the next ones along n


@dataclass(frozen=True)
class BulkTiling:
    """How a product [m, k] by [k, n] is cut up.

    Attributes:
        rows, columns: Size of a tile along m and n.
        turns: Whether the two multiplying warpgroups have a tile each, so that one stores while the other multiplies;
            else they share the rows of one.
        splits: Parts of k, each for a block of its own, which form a cluster and add what they have. Such blocks
            compute one tile and take no turns.
    """

    rows: int
    columns: int
    turns: bool = False
    splits: int = 1

    @property
    def threads(self) -> int:
        return 3 * 128

    @property
    def stages(self) -> int:
        """Tiles of both operands that fit a block's shared memory."""
        return SHARED_BYTES // (self._stage_bytes + _BARRIER_BYTES)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (self._stage_bytes + _BARRIER_BYTES)

    @property
    def _stage_bytes(self) -> int:
        return (self.rows + self.columns) * _LINE_BYTES

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Tiles along m and n."""
        return ceil(m / self.rows), ceil(n / self.columns)

    def blocks(self, tiles: int) -> int:
        """Blocks to launch for each part of k: where they stay, one a multiprocessor at the most."""
        return tiles if self.splits > 1 else min(MULTIPROCESSORS, tiles)

    def macros(self) -> dict[str, object]:
        """What the kernel's file expects."""
        return {
            "TILE_M": self.rows,
            "TILE_N": self.columns,
            "STAGES": self.stages,
            "TURNS": int(self.turns),
            "SPLITS": self.splits,
            "PANEL": _PANEL,
        }


_SHARED = [BulkTiling(128, columns) for columns in (32, 64, 96, 128, 160, 192, 256)]
_IN_TURNS = [BulkTiling(128, columns, turns=True) for columns in (64, 128, 160, 192)]
_SPLIT = [BulkTiling(128, columns, splits=splits) for columns in (32, 64, 96, 128, 192, 224) for splits in (2, 4)]
BULK_CANDIDATES = (*_SHARED, BulkTiling(256, 128), *_IN_TURNS, *_SPLIT)

_USABLE = {1: MULTIPROCESSORS, 2: 132, 4: 120}  # multiprocessors that clusters of a size can fill
_WHOLE_ROUNDS = 0.87  # how much a round that does not fill the device costs, of what it leaves idle
_STORE = 0.33  # clocks for a result
_ADD, _ADD_RESULT = 2740, 0.07  # clocks for blocks to wait for each other, and to add a result
_CLOSE, _MOST = 1.1, 3  # of the best tiling's clocks, and tilings that are worth timing


@lru_cache(maxsize=1024)  # a model has the same product in many layers
def bulk_tilings(m: int, n: int, k: int) -> tuple[BulkTiling, ...]:
    """Tilings of a product [m, k] by [k, n] that are worth timing, the best by the model of their cost first."""
    steps = ceil(k / LINE)
    possible = [tiling for tiling in BULK_CANDIDATES if tiling.splits == 1 or tiling.splits * 2 <= steps]
    ranked = sorted((_clocks(tiling, m, n, k), index) for index, tiling in enumerate(possible))[:_MOST]
    return tuple(possible[index] for clocks, index in ranked if clocks <= _CLOSE * ranked[0][0])


def _clocks(tiling: BulkTiling, m: int, n: int, k: int) -> float:
    """Clocks that a product takes, without the launch."""
    tiles_m, tiles_n = tiling.tiles(m, n)
    average = max(1.0, tiles_m * tiles_n * tiling.splits / _USABLE[tiling.splits])
    rounds = _WHOLE_ROUNDS * ceil(average) + (1 - _WHOLE_ROUNDS) * average
    results = tiling.rows * tiling.columns
    products = rounds * ceil(ceil(k / LINE) / tiling.splits) * _step(tiling)
    if tiling.turns:
        return products + 2 * _STORE * results  # the last tile's alone, by half of the warps
    return products + rounds * _STORE * results + (_ADD + _ADD_RESULT * results if tiling.splits > 1 else 0)


def _step(tiling: BulkTiling) -> float:
    """Clocks of a step along k: shared memory takes and gives a line a clock, tensor cores multiply 32 lines by one."""
    written = tiling.rows + tiling.columns
    read = tiling.rows / _ROWS * (_ROWS + tiling.columns)
    return max(written + read, tiling.rows * tiling.columns / 32)
