"""Sizes of the tiled kernels, and which operands they can read 16 bytes at a time."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.dtypes import FLOAT32, DType
from npu_compiler.lowering.operands import MAX_ELEMENTS
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.trace import TracedTensor

__all__ = [
    "GROUP",
    "MAX_GRID",
    "TILE_THREADS",
    "check_size",
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
    return min(range(64, 0, -8), key=lambda size: -(-rows // size) * (size + _TILE_OVERHEAD))


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
    fits = dtype == tile and contiguous == 1 and all(number % chunk == 0 for number in multiples)
    return chunk if fits else 1


def check_size(tensor: TracedTensor) -> None:
    """Refuses a tensor whose elements a kernel cannot count.

    Raises:
        OpRefusal: It has 2^31 elements or more.
    """
    if tensor.layout.size >= MAX_ELEMENTS:
        raise OpRefusal(f"'{tensor.name}' has {tensor.layout.size} elements, more than kernels address (2^31)")
