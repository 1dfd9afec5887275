"""Products as the kernels see them: which of them tensor cores take as they lie, and where each of a batch begins."""

from __future__ import annotations

from collections.abc import Sequence

from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import CHUNK
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.lowering.anchors import function
from npu_compiler.lowering.problems.product import Matrix, Product

__all__ = ["are_along_k", "fits_coded_tiles", "fits_tiles", "offset_function"]


def fits_tiles(found: Product) -> bool:
    """Whether both operands are of the same 16-bit type and read 16 bytes at a time."""
    half = found.a.dtype == found.b.dtype and found.a.dtype in (FLOAT16, BFLOAT16)
    return half and _fits_chunks(found.a, found.m, found.k) and _fits_chunks(found.b, found.n, found.k)


def fits_coded_tiles(found: Product) -> bool:
    """Whether the left operand is read 16 bytes at a time, and the right one, which is codes, 8 of these at a time."""
    half = found.a.dtype in (FLOAT16, BFLOAT16)
    return half and _fits_chunks(found.a, found.m, found.k) and _fits_chunks(found.b, found.n, found.k)


def _fits_chunks(operand: Matrix, extent: int, depth: int) -> bool:
    """Whether 16 bytes at a time can be read, along k or along the other dimension."""
    along_k = operand.k == 1
    return operand.has_chunks(CHUNK, depth if along_k else extent, along_k)


def are_along_k(found: Product) -> bool:
    """Whether neighbours in memory are neighbours along k, in both operands."""
    return found.a.k == found.b.k == 1


def offset_function(name: str, batch: Sequence[int], strides: Sequence[int]) -> str:
    """A device function ``name_offset`` that gives where an operand begins, from the position in the batch."""
    lines, terms = [], []
    for dim in range(len(batch) - 1, 0, -1):
        lines += [f"    int i{dim} = batch % {batch[dim]};", f"    batch /= {batch[dim]};"]
        terms.append(f"(long long)i{dim} * {strides[dim]}")
    terms.append(f"(long long)batch * {strides[0]}")
    head = f"{CUDA.inline} long long {name}_offset(int batch, const Params& p)"
    return function(head, lines, " + ".join(terms))
