"""Lowers matrix products: tensor cores, a parallel reduction for a few rows, or plain arithmetic for what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cuda_compiler.anchors import TILE_FILES, anchor_launch, anchor_source
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import Positions, pack_size, resolve_anchor
from cuda_compiler.tiles import choose_tiling
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.operands import MAX_ELEMENTS, TensorArg
from npu_compiler.codegen.target import Launch, Lowering
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.expr import Ref
from npu_compiler.symbolic import OpRefusal
from npu_compiler.trace import TracedTensor
from npu_compiler.view import collapse

__all__ = ["lower_matmul"]

_CHUNK = 8  # elements of 16 bytes
_MAX_VECTORS = 8
_PLAIN_SIDE = 64
_THREADS = 128


@dataclass(frozen=True)
class _Matrix:
    """An operand, as [along, k]: its tensor, where it begins, its strides, and those along the merged batch."""

    tensor: TracedTensor
    offset: int
    along: int
    k: int
    batch: tuple[int, ...]

    @property
    def argument(self) -> TensorArg:
        return TensorArg(self.tensor.index, self.offset * self.tensor.dtype.size)

    def fits_chunks(self, extent: int, depth: int) -> bool:
        """Whether 16 bytes at a time can be read, along k or along the other dimension."""
        others = (self.offset, *self.batch)
        if self.k == 1:
            others = (*others, self.along, depth)
        elif self.along == 1:
            others = (*others, self.k, extent)
        else:
            return False
        return all(number % _CHUNK == 0 for number in others)


@dataclass(frozen=True)
class _Product:
    """``a @ b``: [m, k] by [k, n] for each position of the merged batch dimensions."""

    a: _Matrix
    b: _Matrix
    m: int
    n: int
    k: int
    batch: tuple[int, ...]

    @property
    def flops(self) -> int:
        return 2 * prod(self.batch) * self.m * self.n * self.k


def lower_matmul(group: Group, lowering: Lowering) -> list[Launch]:
    """One launch, for operands of any strides.

    Raises:
        OpRefusal: A tensor is too large.
    """
    found = _product(group, lowering)
    for operand in (found.a, found.b):
        if operand.tensor.layout.size >= MAX_ELEMENTS:
            raise OpRefusal(f"'{operand.tensor.name}' has {operand.tensor.layout.size} elements, at most 2^31 are read")
    rank = len(group.shape)
    positions = resolve_anchor(group, lowering, (range(rank - 2), (rank - 2,), (rank - 1,)))
    if found.m <= _MAX_VECTORS and _is_row_major(found.b) and found.a.k == 1:
        return [_lower_vectors(found, group, lowering, positions, found.b, found.a)]
    if found.n <= _MAX_VECTORS and _is_row_major(found.a) and found.b.k == 1:
        return [_lower_vectors(found, group, lowering, positions, found.a, found.b)]
    half = found.a.tensor.dtype == found.b.tensor.dtype and found.a.tensor.dtype in (FLOAT16, BFLOAT16)
    if half and found.a.fits_chunks(found.m, found.k) and found.b.fits_chunks(found.n, found.k):
        return [_lower_tiled(found, group, lowering, positions)]
    return [_lower_plain(found, group, lowering, positions)]


def _product(group: Group, lowering: Lowering) -> _Product:
    left, right = anchor_source(group).operands
    *batch_shape, m, n = group.shape
    batch, (a_batch, b_batch) = collapse(tuple(batch_shape), [left.view.strides[:-2], right.view.strides[:-2]])
    a = _matrix(lowering.tensors[left.tensor], left, (-2, -1), a_batch)
    b = _matrix(lowering.tensors[right.tensor], right, (-1, -2), b_batch)
    return _Product(a, b, m, n, left.view.shape[-1], batch)


def _matrix(tensor: TracedTensor, ref: Ref, dims: tuple[int, int], batch: tuple[int, ...]) -> _Matrix:
    """An operand; a dimension of one element has no stride of its own and takes whichever suits."""
    along, k = (ref.view.strides[dim] for dim in dims)
    if ref.view.shape[dims[1]] == 1 and along != 1:
        k = 1
    if ref.view.shape[dims[0]] == 1 and k == 1:
        along = 0
    return _Matrix(tensor, ref.view.offset, along, k, batch)


def _is_row_major(matrix: _Matrix) -> bool:
    return matrix.k == 1


def _offset_function(name: str, batch: Sequence[int], strides: Sequence[int]) -> str:
    """A device function that gives where an operand begins, from the position in the batch."""
    lines = [f"__device__ __forceinline__ long long {name}_offset(int batch, const Params& p)", "{"]
    terms = []
    for dim in range(len(batch) - 1, 0, -1):
        lines += [f"    int i{dim} = batch % {batch[dim]};", f"    batch /= {batch[dim]};"]
        terms.append(f"(long long)i{dim} * {strides[dim]}")
    terms.append(f"(long long)batch * {strides[0]}")
    return "\n".join([*lines, f"    return {' + '.join(terms)};", "}"])


def _offsets(found: _Product) -> str:
    functions = (_offset_function(name, found.batch, part.batch) for name, part in (("a", found.a), ("b", found.b)))
    return "\n".join(functions)


def _strides(found: _Product) -> dict[str, int]:
    return {
        "m": found.m,
        "n": found.n,
        "k": found.k,
        "a_row": found.a.along,
        "a_k": found.a.k,
        "b_col": found.b.along,
        "b_k": found.b.k,
    }


def _lower_tiled(found: _Product, group: Group, lowering: Lowering, positions: Positions) -> Launch:
    tiling = choose_tiling(found.m, found.n, found.k, prod(found.batch))
    tiles_m, tiles_n = -(-found.m // tiling.rows), -(-found.n // tiling.columns)
    tiles = tiles_m * tiles_n * prod(found.batch)
    macros = {
        **tiling.macros(tiles),
        "tile_t": CUDA.storage[found.a.tensor.dtype.name],
        "A_ALONG_K": int(found.a.k == 1),
        "B_ALONG_K": int(found.b.k == 1),
        "B_CONSTANT": int(found.b.tensor.source is None),
    }
    partial = tiles * tiling.splits * tiling.rows * tiling.columns * 4
    parts = TensorArg(lowering.scratch(partial), writes=True) if tiling.splits > 1 else found.b.argument
    return anchor_launch(
        "matmul",
        group,
        lowering,
        positions,
        size=pack_size(group, positions.operands, group.shape[-1]),
        inputs=(found.a.argument, found.b.argument, parts),
        values={**_strides(found), "tiles_m": tiles_m, "tiles_n": tiles_n},
        macros=macros,
        flops=found.flops,
        blocks=tiles,
        threads=tiling.threads,
        splits=tiling.splits,
        shared_bytes=tiling.shared_bytes,
        generated=_offsets(found),
        parts=TILE_FILES,
    )


def _lower_plain(found: _Product, group: Group, lowering: Lowering, positions: Positions) -> Launch:
    tiles_m, tiles_n = -(-found.m // _PLAIN_SIDE), -(-found.n // _PLAIN_SIDE)
    macros = {
        "a_t": CUDA.storage[found.a.tensor.dtype.name],
        "b_t": CUDA.storage[found.b.tensor.dtype.name],
        "A_ALONG_K": int(found.a.k == 1),
        "B_ALONG_K": int(found.b.k == 1),
    }
    return anchor_launch(
        "matmul_plain",
        group,
        lowering,
        positions,
        size=1,
        inputs=[found.a.argument, found.b.argument],
        values={**_strides(found), "tiles_m": tiles_m, "tiles_n": tiles_n},
        macros=macros,
        flops=found.flops,
        blocks=tiles_m * tiles_n * prod(found.batch),
        threads=256,
        generated=_offsets(found),
    )


def _lower_vectors(
    found: _Product, group: Group, lowering: Lowering, positions: Positions, matrix: _Matrix, vector: _Matrix
) -> Launch:
    """A product with at most eight rows, or columns: the other operand is read once, at the pace of the memory."""
    by_row = matrix is found.b  # the vectors are rows of a, and of the result
    vectors, outputs = (found.m, found.n) if by_row else (found.n, found.m)
    load = _vector_load(matrix, vector, found.k)
    lanes = 32
    while lanes > 1 and lanes * load >= 2 * found.k:
        lanes //= 2
    share = 2 if outputs * prod(found.batch) >= 4096 and vectors <= 4 else 1
    groups = -(-outputs // share)
    macros = {
        "matrix_t": CUDA.storage[matrix.tensor.dtype.name],
        "vector_t": CUDA.storage[vector.tensor.dtype.name],
        "VECTORS": vectors,
        "OUTPUTS": share,
        "LANES": lanes,
        "LOAD": load,
        "VECTOR_ROW": "v" if by_row else "output + o",
        "VECTOR_COL": "output + o" if by_row else "v",
    }
    values = {
        "outputs": outputs,
        "groups": groups,
        "batches": prod(found.batch),
        "k": found.k,
        "matrix_row": matrix.along,
        "vector_row": vector.along,
    }
    operands = (("matrix", matrix), ("vector", vector))
    functions = (_offset_function(name, found.batch, part.batch) for name, part in operands)
    return anchor_launch(
        "matvec",
        group,
        lowering,
        positions,
        size=1,
        inputs=[matrix.argument, vector.argument],
        values=values,
        macros=macros,
        flops=found.flops,
        blocks=-(-groups * prod(found.batch) * lanes // _THREADS),
        threads=_THREADS,
        generated="\n".join(functions),
    )


def _vector_load(matrix: _Matrix, vector: _Matrix, k: int) -> int:
    """Elements that a lane loads at a time from both operands."""
    size = 16 // max(matrix.tensor.dtype.size, vector.tensor.dtype.size)
    numbers = (k, *(n for m in (matrix, vector) for n in (m.offset, m.along, *m.batch)))
    while size > 1 and any(number % size for number in numbers):
        size //= 2
    return size
