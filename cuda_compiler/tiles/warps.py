"""Tiles multiplied by single warps, which every GPU has; blocks that share a tile leave their parts in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from cuda_compiler.tiles.tiling import STAGED_COLUMNS, WARPS, Asked, Tiling
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants, scaling

__all__ = ["WarpCosts", "WarpTile", "WarpTiling", "warp_candidates", "warp_clocks"]

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True)
class WarpTiling(Tiling):
    """Tiles that all warps of a block copy and multiply."""

    files = ("tensor_cores.cuh", "tile.cuh", "tile_copies.cuh", "tile_warps.cuh", "tile_store.cuh", "tile_once.cuh")

    @property
    def shared_bytes(self) -> int:
        """Operands, or later 16 rows of at most 64 columns for each warp."""
        columns = self.columns // self.warps_n
        at_a_time = next((width for width in (64, 32) if columns % width == 0), 16)
        staging = self.warps_m * self.warps_n * 16 * (at_a_time + STAGED_COLUMNS) * 4
        return max(self.operand_bytes, staging)

    def partial_bytes(self, tiles: int) -> int:
        return 0 if self.splits == 1 else tiles * self.splits * self.rows * self.columns * 4


@dataclass(frozen=True)
class WarpTile:
    """A tile that may be chosen, and what a multiprocessor needs for it.

    Attributes:
        step: Clocks that one step along k takes a block at the least.
        products: 16-bit multiply-adds a clock.
        resident: Blocks that share the multiprocessor.
    """

    rows: int
    columns: int
    depth: int
    warps_m: int
    warps_n: int
    stages: int
    blocks: int
    step: int
    products: int = scaling("core_products")
    resident: int = scaling("core_shared_bytes")

    @property
    def tiling(self) -> WarpTiling:
        """With one split."""
        return WarpTiling(
            self.rows, self.columns, self.depth, self.warps_m, self.warps_n, self.stages, self.blocks, splits=1
        )


@dataclass(frozen=True)
class WarpCosts(FamilyConstants, family=WARPS):
    """The constants of the family.

    Attributes:
        tiles: What may be chosen.
        start: Clocks from the launch of a block to its first product.
        store: Clocks for a result, with each block that shares the multiprocessor.
        split: Clocks for the blocks of one tile to find out which is the last.
        partial_bytes: Bytes of other blocks' parts that the last one reads a clock.
        traffic_bytes: Bytes that all multiprocessors move a clock.
    """

    tiles: tuple[WarpTile, ...]
    start: float
    store: float
    split: float
    partial_bytes: float
    traffic_bytes: float = scaling("cache_a_clock")


def warp_candidates(asked: Asked, device: DeviceModel) -> Iterator[Candidate[Tiling]]:
    """All tiles with all numbers of splits, those of few splits and few rows first."""
    costs = WarpCosts.of(device)
    variants = (
        (tiling, tile) for tile in costs.tiles for tiling in _variants(tile.tiling, asked.k) if _fits(tiling, device)
    )
    for tiling, tile in sorted(variants, key=lambda pair: (pair[0].splits, pair[0].rows)):
        clocks = warp_clocks(tiling, tile, costs, asked, device)
        yield Candidate(WARPS, tiling, device.microseconds(clocks))


def _fits(tiling: WarpTiling, device: DeviceModel) -> bool:
    return tiling.shared_bytes <= device.shared_bytes


def _variants(base: WarpTiling, k: int) -> Iterator[WarpTiling]:
    steps = ceil(k / base.depth)
    for splits in _SPLITS:
        if splits == 1 or splits * 2 <= steps:
            yield replace(base, stages=max(2, min(base.stages, ceil(steps / splits) + 1)), splits=splits)


def warp_clocks(tiling: WarpTiling, tile: WarpTile, costs: WarpCosts, asked: Asked, device: DeviceModel) -> float:
    """Clocks that a product takes, by a model of waves of blocks that are bound by products, steps or traffic."""
    size = tiling.rows * tiling.columns
    tiles = asked.tiles(tiling.rows, tiling.columns)
    blocks = tiles * tiling.splits
    steps = ceil(ceil(asked.k / tiling.depth) / tiling.splits)

    def wave(resident: int) -> float:
        products = resident * size * tiling.depth / tile.products
        return costs.start + costs.store * resident * size + steps * max(tile.step, products)

    full, rest = divmod(blocks, device.cores * tile.resident)
    clocks = full * wave(tile.resident) + (wave(ceil(rest / device.cores)) if rest else 0)
    loads = blocks * (tiling.rows + tiling.columns) * min(steps * tiling.depth, asked.k) * 2
    clocks = max(clocks, (loads + tiles * size * 2) / costs.traffic_bytes)
    if tiling.splits > 1:
        clocks += costs.split + tiling.splits * size * 4 / costs.partial_bytes
    return clocks
