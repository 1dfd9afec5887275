"""Sizes of the tiled kernels, and which operands they can read 16 bytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from metal_compiler.dialect import METAL
from npu_compiler.dtypes import FLOAT32, DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.candidates import THE_BEST, Candidate, best_candidates
from npu_compiler.lowering.device_model import DeviceModel, FamilyConstants
from npu_compiler.lowering.problems.operand import are_chunks

__all__ = [
    "GROUP",
    "MAX_GRID",
    "TILE_THREADS",
    "Asked",
    "Tiling",
    "best_tiling",
    "chunk_of",
    "tile_candidates",
    "tile_dtype",
]

GROUP = 8  # neighbouring results that a thread stores together; GROUP of store.metal
MAX_GRID = 65535  # threadgroups in y and in z
TILE_THREADS = 128
_VECTOR_BYTES = 16
_MATRIX = 8  # rows and columns of what a simdgroup multiplies at a time


def tile_dtype(a: DType, b: DType) -> DType:
    """The data type that operands are multiplied in: their own, or float32 where they differ."""
    return a if a == b else FLOAT32


@dataclass(frozen=True)
class Tiling:
    """How a product [m, k] by [k, n] is cut up: the size of a tile along m, n and k."""

    rows: int
    columns: int
    depth: int

    def macros(self, a: DType, b: DType, tile: DType) -> dict[str, object]:
        """What kernels are told of tiles of operands of two data types, which are multiplied in a third."""
        kinds = {name: METAL.storage[kind.name] for name, kind in (("a_t", a), ("b_t", b), ("tile_t", tile))}
        return {**kinds, "TILE_M": self.rows, "TILE_N": self.columns, "TILE_K": self.depth}


@dataclass(frozen=True)
class Asked:
    """What is asked of the tiles: a product [m, k] by [k, n], `batch` times, multiplied in a data type."""

    m: int
    n: int
    k: int
    batch: int
    dtype: DType


@dataclass(frozen=True)
class _Costs(FamilyConstants, family="tiles"):
    """The constants of the family.

    Attributes:
        rows: Rows of the largest tile; others have a multiple of 8.
        columns, few_columns: Columns of a tile, and where a product has no more than that.
        depth_bytes: How far a tile reaches along k.
        overhead_rows: Rows that staging the columns of a tile costs as much as.
    """

    rows: int
    columns: int
    few_columns: int
    depth_bytes: int
    overhead_rows: int


def tile_candidates(asked: Asked, device: DeviceModel) -> Iterator[Candidate[Tiling]]:
    """Tiles of different rows, the highest first: as many as leave little of the last tile outside, 56 for 49 or 784.

    A tile takes as long as its products, and those of the rows that staging its columns costs as much as.
    """
    costs = _Costs.of(device)
    columns = costs.columns if asked.n > costs.few_columns else costs.few_columns
    depth = costs.depth_bytes // asked.dtype.size
    of_a_row = ceil_div(asked.n, columns) * columns * asked.k * asked.batch
    for rows in range(costs.rows, 0, -_MATRIX):
        products = ceil_div(asked.m, rows) * (rows + costs.overhead_rows) * of_a_row
        yield Candidate(costs.family, Tiling(rows, columns, depth), products / device.products_a_microsecond)


def best_tiling(asked: Asked, device: DeviceModel) -> Tiling:
    """The tiling that takes the least time, by the model of its cost."""
    return best_candidates(tile_candidates(asked, device), THE_BEST)[0].sizes


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
