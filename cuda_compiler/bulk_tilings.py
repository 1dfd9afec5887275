"""Tiles of products whose operands the copy engine of compute capability 9.0 brings, and which ones to take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from cuda_compiler.tiles import MULTIPROCESSORS
from cuda_compiler.wgmma import SHARED_BYTES

__all__ = ["LINE", "BulkTiling", "bulk_tilings"]

LINE = 64  # elements of 16 bits: 128 bytes, what is copied and multiplied of a row at a time
_LINE_BYTES, _BARRIER_BYTES = 128, 16
_PANEL = 16  # clusters of tiles along m that follow each other before the next ones along n


@dataclass(frozen=True)
class BulkTiling:
    """How a product [m, k] by [k, n] is cut up.

    Attributes:
        rows, columns: Size of a tile along m and n.
        turns: Whether the two multiplying warpgroups have a tile each, so that one stores while the other multiplies;
            else they share the rows of one.
        cluster: Neighbouring blocks that copy what they share once.
        along_rows: Whether the blocks of a cluster follow each other along m, not n.
        splits: Parts of k, each for a block of its own, which form a cluster and add what they have. Such blocks
            compute one tile, take no turns and share no copies.
    """

    rows: int
    columns: int
    turns: bool = False
    cluster: int = 1
    along_rows: bool = True
    splits: int = 1

    @property
    def threads(self) -> int:
        return 3 * 128

    @property
    def cluster_rows(self) -> int:
        return self.cluster if self.along_rows else 1

    @property
    def cluster_columns(self) -> int:
        return 1 if self.along_rows else self.cluster

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

    def clusters_of_tiles(self, m: int, n: int) -> tuple[int, int]:
        """Tiles along m and n, a cluster's counted as one."""
        return ceil(m / (self.rows * self.cluster_rows)), ceil(n / (self.columns * self.cluster_columns))

    def blocks(self, tiles: int) -> int:
        """Blocks to launch for as many tiles of clusters: where they stay, one a multiprocessor at the most."""
        if self.splits > 1:
            return tiles * self.splits
        return min(MULTIPROCESSORS // self.cluster, tiles) * self.cluster

    def macros(self) -> dict[str, object]:
        """What the kernel's file expects."""
        return {
            "TILE_M": self.rows,
            "TILE_N": self.columns,
            "STAGES": self.stages,
            "TURNS": int(self.turns),
            "CLUSTER": self.cluster,
            "ALONG_ROWS": int(self.along_rows),
            "SPLITS": self.splits,
            "PANEL": _PANEL,
        }


@lru_cache(maxsize=1024)  # a model has the same product in many layers
def bulk_tilings(m: int, n: int, k: int) -> tuple[BulkTiling, ...]:
    """Tilings that are worth timing, the best first."""
    return (BulkTiling(128, 192, turns=True),)
