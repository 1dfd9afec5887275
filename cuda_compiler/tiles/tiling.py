"""How a product of matrices is cut into tiles that blocks copy and multiply; what the families of tiles share."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from cuda_compiler.packing import PACK_SIZES
from npu_compiler.dtypes import DType
from npu_compiler.lowering.anchors import Epilogue
from npu_compiler.lowering.device_model import DeviceModel

__all__ = ["BULK", "CLUSTERED", "STAGED_COLUMNS", "TEAMS", "WARPS", "Asked", "Tiling"]
__all__ += ["TILE_MACROS", "TILING_MACROS", "with_codes"]

WARPS, CLUSTERED, TEAMS, BULK = "warp_tiles", "cluster_tiles", "team_tiles", "bulk_tiles"
"""Families of tiles, by their names in the data of devices."""

TILING_MACROS = "TEAMS PANEL TILE_M TILE_N TILE_K WARPS_M WARPS_N STAGES BLOCKS SPLITS SHARED_BYTES RESULT_TILES"
"""What `Tiling.macros` defines for kernel files, whatever they multiply."""

TILE_MACROS = f"AHEAD? {TILING_MACROS}"
"""The same where clusters share tiles, too."""

STAGED_COLUMNS = 4  # floats from the end of one staged row to the next, so that neighbours begin in different banks


@dataclass(frozen=True)
class Asked:
    """What is asked of a family of tiles: a product [m, k] by [k, n], `batch` times.

    Attributes:
        m, n, k, batch: Its sizes.
        moved: Bytes that the epilogue reads and stores for each of the product's results.
        operations: What it computes for each of them.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    moved: float = 2.0
    operations: int = 0

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of so many rows and columns."""
        return ceil(self.m / rows) * ceil(self.n / columns) * self.batch


@dataclass(frozen=True)
class Tiling:
    """How a matrix product [m, k] by [k, n] is cut up; each family has a type of its own.

    Attributes:
        rows, columns, depth: Size of a tile along m, n and k.
        warps_m, warps_n: How a block's warps, or those of a team, share the results.
        stages: Tiles in shared memory at a time.
        blocks: Blocks that should fit a multiprocessor: the compiler limits registers for them.
        splits: Blocks that share one tile of results, each with a part of k.
        requires: What a device must have, as in `CallOption`.
        files: The kernel files that multiply and store such tiles.
    """

    rows: int
    columns: int
    depth: int
    warps_m: int
    warps_n: int
    stages: int
    blocks: int
    splits: int = 1
    requires: ClassVar[str] = ""
    files: ClassVar[tuple[str, ...]] = ()

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps_m * self.warps_n

    @property
    def operand_bytes(self) -> int:
        """Shared memory for the tiles of both operands."""
        return self.stages * (self.rows + self.columns) * self.depth * 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: operands, or later results brought into rows."""
        return self.operand_bytes

    def grid(self, tiles: int, device: DeviceModel) -> int:
        """Blocks for so many tiles of results, one split each."""
        return tiles

    def partial_bytes(self, tiles: int) -> int:
        """Memory for the parts of blocks that share a tile; none where they reach each other otherwise."""
        return 0

    def functions(self, dtype: str) -> str:
        """The functions that the kernel multiplies with, beside those of its files."""
        return ""

    def epilogue(self, fused: Epilogue) -> Epilogue:
        """The epilogue as the files call it."""
        return fused

    def macros(self, results: int, steps: int, panel: int = 1) -> dict[str, object]:
        """What the files expect.

        Args:
            results: Tiles of the whole result.
            steps: Tiles along k.
            panel: Tiles along m that follow each other before the next ones along n.
        """
        return {
            "TEAMS": 0,
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

    def neighbours(self, dtype: DType) -> int:
        """Results of a data type that a thread may store together."""
        return PACK_SIZES[0]

    def panel(self, tiles_m: int, tiles_n: int, device: DeviceModel) -> int:
        """Tiles along m that should follow each other, so that tiles computed at a time read as little as they can."""
        at_a_time = device.cores * self.blocks
        height = max(1, min(tiles_m, round((at_a_time * self.columns / self.rows) ** 0.5)))
        return height if tiles_n * height > at_a_time else 1


def with_codes(files: tuple[str, ...]) -> tuple[str, ...]:
    """The kernel files of a tiling, with what multiplies pairs of codes of a byte as if they were 16-bit numbers."""
    place = files.index("tile.cuh")
    return (*files[:place], "code_pairs.cuh", *files[place:])
