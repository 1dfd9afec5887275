"""What the kernel files of tiles agree on with `Tiling`, whatever they multiply."""

from __future__ import annotations

__all__ = ["TILE_MACROS", "TILING_MACROS"]

TILING_MACROS = "TEAMS PANEL TILE_M TILE_N TILE_K WARPS_M WARPS_N STAGES BLOCKS SPLITS SHARED_BYTES RESULT_TILES"
"""What `Tiling.macros` defines."""

TILE_MACROS = f"AHEAD? {TILING_MACROS}"
"""The same where clusters share tiles, too."""
