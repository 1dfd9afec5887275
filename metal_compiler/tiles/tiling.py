"""Sizes of the tiled kernels, and which operands they can read 16 bytes at a time."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.dtypes import FLOAT32, DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.problems.operand import are_chunks

__all__ = [
    "GROUP",
    "MAX_GRID",
    "TILE_THREADS",
    "chunk_of",
    "tile_columns",
    "tile_depth",
    "tile_dtype",
    "tile_rows",
]

GROUP = 8  # neighbouring results that a thread stores together; GROUP of store.metal
MAX_GRID = 65535  # threadgroups in y and in z
TILE_THREADS = 128
_VECTOR_BYTES = 16
_STEP_BYTES = 64
_TILE_OVERHEAD = 12  # rows that staging the columns of a tile costs as much as


def tile_dtype(a: DType, b: DType) -> DType:
    """The data type that operands are multiplied in: their own, or float32 where they differ."""
    return a if a == b else FLOAT32


def tile_rows(rows: int) -> int:
    """Rows of a tile, a multiple of 8 up to 64, such that little of the last tile lies outside: 56 for 49 or 784."""
    return min(range(64, 0, -8), key=lambda size: ceil_div(rows, size) * (size + _TILE_OVERHEAD))


def tile_columns(columns: int) -> int:
    return 64 if columns > 32 else 32


def tile_depth(dtype: DType) -> int:
    """How far a tile reaches along k."""
    return _STEP_BYTES // dtype.size


def chunk_of(dtype: DType, tile: DType, contiguous: int, multiples: Sequence[int]) -> int:
    """Elements that a tiled kernel copies at a time: as many as 16 bytes hold where alignment allows, else 1.

    Args:
        dtype: Data type in memory.
        tile: Data type that it is multiplied in.
        contiguous: Stride along the dimension in question.
        multiples: The numbers that must be multiples of a chunk: offset, other strides, extent.
    """
    chunk = _VECTOR_BYTES // dtype.size
    return chunk if dtype == tile and are_chunks(chunk, contiguous, multiples) else 1
