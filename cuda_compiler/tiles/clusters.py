"""Tiles that warpgroups multiply and whose common dimension blocks of a cluster share; compute capability 9.0 alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.devices import cluster_cores, offers
from cuda_compiler.tiles.tiling import CLUSTERED, STAGED_COLUMNS, Asked, Tiling
from cuda_compiler.tiles.wgmma import LINE, WARPGROUP_ROWS, warpgroup_product
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants, scaling

__all__ = ["ClusterCosts", "ClusterTile", "ClusterTiling", "cluster_candidates", "cluster_clocks"]


@dataclass(frozen=True)
class ClusterTiling(Tiling):
    """Tiles of blocks that form a cluster, and so need no memory for their parts."""

    requires = WARPGROUPS
    files = (
        *("tensor_cores.cuh", "warpgroups.cuh", "clusters.cuh", "tile.cuh"),
        *("tile_copies.cuh", "tile_warpgroups.cuh", "tile_cluster.cuh", "tile_once.cuh"),
    )

    @property
    def shared_bytes(self) -> int:
        """Operands, or later a whole tile of sums."""
        return max(self.operand_bytes, self.rows * (self.columns + STAGED_COLUMNS) * 4)

    def functions(self, dtype: str) -> str:
        return warpgroup_product(self.columns // self.warps_n, dtype)

    def macros(self, results: int, steps: int, panel: int = 1) -> dict[str, object]:
        return {"AHEAD": self.ahead(ceil_div(steps, self.splits)), **super().macros(results, steps, panel)}

    def ahead(self, steps: int) -> int:
        """Tiles of a block that are copied before the first is multiplied, of `steps`.

        Where shared memory is used again, two tiles may still be at work while the next ones are asked for.
        """
        return max(1, steps) if steps <= self.stages else self.stages - 2


@dataclass(frozen=True)
class ClusterTile:
    """A tile that may be chosen.

    Attributes:
        products: 16-bit multiply-adds of a multiprocessor a clock.
        step: Clocks that a step along k takes a block at the least.
    """

    rows: int
    columns: int
    stages: int
    blocks: int
    products: int
    step: int

    def tiling(self, stages: int, splits: int) -> ClusterTiling:
        """Each warpgroup multiplies 64 rows, or 128 where there are 256."""
        warps = 4 if self.rows == WARPGROUP_ROWS else 8
        return ClusterTiling(self.rows, self.columns, LINE, warps, 1, stages, self.blocks, splits)


@dataclass(frozen=True)
class ClusterCosts(FamilyConstants, family=CLUSTERED):
    """The constants of the family.

    Attributes:
        tiles: What may be chosen.
        launch: Clocks from the end of the kernel ahead to the first block, and from the last block to the end.
        start: Clocks from the launch of a block to its first product.
        store_alone, store: Clocks for a result, of one block and of several that share a multiprocessor.
        split, split_result: Clocks for blocks to wait for each other, and to add a result.
        copy_bytes: Bytes that a multiprocessor copies into shared memory a clock.
        cache_bytes: Bytes that all multiprocessors move through the level-2 cache a clock.
        memory_bytes: Bytes of stored results and weights that device memory moves a clock.
        margin: What others' times are multiplied by: tiles for warps are mostly faster than their model says.
    """

    tiles: tuple[ClusterTile, ...]
    launch: float
    start: float
    store_alone: float
    store: float
    split: float
    split_result: float
    margin: float
    copy_bytes: float
    cache_bytes: float = scaling("cache_a_clock")
    memory_bytes: float = scaling("memory_a_clock")


def cluster_candidates(asked: Asked, device: DeviceModel) -> Iterator[Candidate[Tiling]]:
    """All tiles with all sizes of clusters, small clusters and few rows first; none without the instructions."""
    if not offers(device, WARPGROUPS):
        return
    costs, cores = ClusterCosts.of(device), cluster_cores(device)
    for tiling, tile in sorted(_variants(costs, cores, asked.k), key=lambda pair: (pair[0].splits, pair[0].rows)):
        if tiling.shared_bytes <= device.shared_bytes:
            clocks = cluster_clocks(tiling, tile, costs, asked, device) / costs.margin
            yield Candidate(CLUSTERED, tiling, device.microseconds(clocks), tiling.requires)


def _variants(costs: ClusterCosts, cores: Mapping[int, int], k: int) -> Iterator[tuple[ClusterTiling, ClusterTile]]:
    """All candidates, with no more tiles on their way than a block has steps."""
    for tile in costs.tiles:
        for splits in cores:
            steps = ceil(ceil(k / LINE) / splits)
            if splits > 1 and splits * 2 <= ceil(k / LINE):
                yield tile.tiling(min(tile.stages, max(steps, 3 if steps > 2 else 1)), splits), tile


def cluster_clocks(
    tiling: ClusterTiling, tile: ClusterTile, costs: ClusterCosts, asked: Asked, device: DeviceModel
) -> float:
    """Clocks that a product takes: waves of blocks, or what caches and memory move."""
    m, n, k, batch = asked.m, asked.n, asked.k, asked.batch
    size, sides = tiling.rows * tiling.columns, tiling.rows + tiling.columns
    blocks = asked.tiles(tiling.rows, tiling.columns) * tiling.splits
    steps, usable = ceil(ceil(k / LINE) / tiling.splits), cluster_cores(device)[tiling.splits]
    stored = asked.moved * device.cores / costs.memory_bytes
    step = max(size * LINE / tile.products, sides * LINE * 2 / costs.copy_bytes)

    def wave(resident: int) -> float:
        alone = steps * max(tile.step, step) + (costs.store_alone + stored) * size
        return costs.start + max(alone, resident * (steps * step + (costs.store + stored) * size))

    full, rest = divmod(blocks, usable * tiling.blocks)
    clocks = full * wave(tiling.blocks) + (wave(ceil(rest / usable)) if rest else 0)
    results = m * n * batch * asked.moved
    loads = blocks * sides * min(steps * LINE, k) * 2
    moved = (loads + results) / costs.cache_bytes, (n * k * batch * 2 + results) / costs.memory_bytes
    return costs.launch + max(clocks, *moved) + costs.split + size * costs.split_result
