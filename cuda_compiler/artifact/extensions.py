"""What launches on CUDA may have from compute capability 9.0 on: clusters of blocks, and maps for the copy engine."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from npu_compiler.artifact.extension import ArgumentExtension, LaunchExtension, TargetExtensions
from npu_compiler.artifact.plan import Argument, Call, KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16, DType

__all__ = ["EXTENSIONS", "Cluster", "TensorMap", "cluster_along_x", "cluster_of", "is_beside", "map_of"]

_ALONE = (1, 1, 1)
_MAX_CLUSTER = 8  # blocks; what every device that has clusters takes
_MAP_RANKS = range(2, 6)
_MAX_BOX = 256  # elements of a box along a dimension
_LINE_BYTES, _CHUNK_BYTES = (32, 64, 128), 16  # of a tensor map


@dataclass(frozen=True)
class Cluster(LaunchExtension):
    """Blocks in x, y and z that run at once and reach each other's shared memory.

    Attributes:
        size: How many.
        beside: Whether a multiprocessor keeps all that it can for shared memory, none of it for the level-1 cache, so
            that blocks of other launches, which do the same, find room beside these.
    """

    size: tuple[int, int, int]
    beside: bool = False

    def fault(self, grid: tuple[int, int, int], block: tuple[int, int, int]) -> str:
        whole = all(size >= 1 and blocks % size == 0 for size, blocks in zip(self.size, grid, strict=True))
        return "" if whole and prod(self.size) <= _MAX_CLUSTER else "has broken clusters"

    def describe(self) -> str:
        return f"cluster {[*self.size]}{', beside others' if self.beside else ''}"


@dataclass(frozen=True)
class TensorMap(ArgumentExtension):
    """How a copy engine sees a tensor of 16-bit elements: a box of it at a time, in lines of 32, 64 or 128 bytes.

    A kernel gets it by value in the place of an address, encoded for the address where the tensor lies, a multiple of
    16. Elements outside of the tensor are copied as zeros. In shared memory the 16-byte chunks of a line are permuted
    by exclusive or with the number of their 128 bytes.

    Attributes:
        dtype: The elements' data type.
        sizes: Elements along each dimension, the one without gaps first; two to five of them.
        strides: Bytes between neighbours along each dimension but the first; multiples of 16.
        box: Elements of a copy along each dimension, at most 256; the first dimension's make a line.
    """

    dtype: DType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the tensor's first element to behind its last one."""
        steps = (self.dtype.size, *self.strides)
        return self.dtype.size + sum((size - 1) * step for size, step in zip(self.sizes, steps, strict=True))

    @property
    def line_bytes(self) -> int:
        """Of a box in shared memory."""
        return self.box[0] * self.dtype.size

    def fault(self, offset: int, nbytes: int) -> str:
        return "" if self._fits(offset, nbytes) else "has a broken tensor map"

    def describe(self) -> str:
        return f"in boxes of {[*self.box]}"

    def _fits(self, offset: int, nbytes: int) -> bool:
        """Whether a copy engine can take it, and finds all of its elements in the buffer."""
        rank = len(self.sizes)
        same = len(self.strides) == rank - 1 and len(self.box) == rank and rank in _MAP_RANKS
        line = same and self.dtype in (FLOAT16, BFLOAT16) and self.line_bytes in _LINE_BYTES
        extents = all(1 <= n < 1 << 32 for n in self.sizes) and all(1 <= n <= _MAX_BOX for n in self.box)
        aligned = all(0 < n < 1 << 40 and n % _CHUNK_BYTES == 0 for n in self.strides) and offset % _CHUNK_BYTES == 0
        return line and extents and aligned and offset + self.nbytes <= nbytes


EXTENSIONS = TargetExtensions(Cluster, TensorMap)


def cluster_along_x(blocks: int, beside: bool = False) -> Cluster | None:
    """A cluster of neighbouring blocks in x; None for a block alone that is `beside` no others."""
    return Cluster((blocks, 1, 1), beside) if blocks > 1 or beside else None


def cluster_of(call: KernelCall) -> tuple[int, int, int]:
    """The size of a launch's clusters in blocks."""
    return call.extension.size if isinstance(call.extension, Cluster) else _ALONE


def is_beside(call: Call) -> bool:
    """Whether blocks of other launches are to find room beside those of a launch."""
    return isinstance(call, KernelCall) and isinstance(call.extension, Cluster) and call.extension.beside


def map_of(argument: Argument) -> TensorMap | None:
    """The map that a kernel gets in the place of an address."""
    return argument.extension if isinstance(argument.extension, TensorMap) else None
