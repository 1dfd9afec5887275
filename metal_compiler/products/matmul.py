"""Lowers matrix products: tiles for matrices, a parallel reduction for a vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from metal_compiler.anchors import AnchorKernel, Dims, KernelText, anchor_kernel, anchor_of
from metal_compiler.products.prologue import PROLOGUE_SIMDGROUPS, vector_prologue
from metal_compiler.tiles.tiling import (
    MAX_GRID,
    TILE_THREADS,
    check_size,
    chunk_of,
    tile_columns,
    tile_depth,
    tile_dtype,
    tile_rows,
)
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import DType
from npu_compiler.lowering.dialect import Dialect
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.target import Lowering
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import View, collapse

__all__ = ["MATMUL_FIELDS", "MATVEC_FIELDS", "lower_matmul"]

_BATCH_FIELDS = ("batch_base", "batch_start", "batch_inner")
MATMUL_FIELDS = (
    *("m", "n", "k", "a_row", "a_k", "b_k", "b_col"),
    *_BATCH_FIELDS,
    *("a_outer", "a_inner", "b_outer", "b_inner"),
)
MATVEC_FIELDS = (
    *("outputs", "k", "matrix_row", "matrix_k", "vector_k"),
    *_BATCH_FIELDS,
    *("matrix_outer", "matrix_inner", "vector_outer", "vector_inner"),
)

_VECTOR = 4  # elements of a vector load in the matrix-vector kernels
_SIMDGROUP_SUMS = 4  # that a simdgroup of matvec.metal computes at a time
_SIMDGROUPS = 4
_PROLOGUE_ROUNDS = 2  # so that computing the vector once for each threadgroup costs little beside reading the matrix


@dataclass(frozen=True)
class _Matrix:
    """An operand: its tensor, where it begins, and its strides along its rows, its columns and the merged batch."""

    tensor: TracedTensor
    offset: int
    strides: tuple[int, int]
    batch: tuple[int, ...]

    @property
    def transposed(self) -> _Matrix:
        return _Matrix(self.tensor, self.offset, (self.strides[1], self.strides[0]), self.batch)

    def chunk(self, tile: DType, columns: int) -> int:
        """Elements that a tiled kernel copies at a time along the rows, which are `columns` long."""
        return chunk_of(self.tensor.dtype, tile, self.strides[1], (self.offset, self.strides[0], *self.batch, columns))

    def argument(self, further: int) -> Argument:
        return Argument(self.tensor.index, (self.offset + further) * self.tensor.dtype.size)


@dataclass(frozen=True)
class _Product:
    """``a @ b``, [m, k] by [k, n], for each position of the merged batch dimensions."""

    a: _Matrix
    b: _Matrix
    m: int
    n: int
    k: int
    batch: tuple[int, ...]


@dataclass(frozen=True)
class _Batches:
    """The part of the batch that one launch computes: the kernel's parameters, and where the operands begin."""

    count: int
    a_offset: int
    b_offset: int
    base: int
    start: int


def lower_matmul(group: Group, lowering: Lowering, dialect: Dialect) -> list[KernelCall]:
    """Matrix products of any strides: one launch, or several where more than two batch dimensions cannot be merged.

    Raises:
        OpRefusal: A tensor is too large.
    """
    found = _product(group, lowering)
    for operand in (found.a, found.b):
        check_size(operand.tensor)
    rank = len(group.shape)
    dims: Dims = (range(rank - 2), (rank - 2,), (rank - 1,))
    if found.m == 1 or found.n == 1:
        return _lower_vector(found, group, lowering, dialect, dims)
    return _lower_tiled(found, group, lowering, dialect, dims)


def _product(group: Group, lowering: Lowering) -> _Product:
    left, right = anchor_of(group).operands
    *batch_shape, m, results = group.shape
    strides = [left.view.strides[:-2], right.view.strides[:-2]]
    batch, (a_batch, b_batch) = collapse(tuple(batch_shape), strides)
    a = _matrix(lowering.tensors[left.tensor], left.view, a_batch)
    b = _matrix(lowering.tensors[right.tensor], right.view, b_batch)
    return _Product(a, b, m, results * group.pairs, left.view.shape[-1], batch)


def _matrix(tensor: TracedTensor, view: View, batch: tuple[int, ...]) -> _Matrix:
    return _Matrix(tensor, view.offset, (view.strides[-2], view.strides[-1]), batch)


def _batches(found: _Product) -> Iterator[_Batches]:
    """One entry for each launch: the grid counts two batch dimensions and at most 65535 products."""
    outer, inner = found.batch[:-2], found.batch[-2:]
    count = prod(inner)
    for number, position in enumerate(product(*map(range, outer))):
        a_offset = sum(i * stride for i, stride in zip(position, found.a.batch, strict=False))
        b_offset = sum(i * stride for i, stride in zip(position, found.b.batch, strict=False))
        for start in range(0, count, MAX_GRID):
            yield _Batches(min(MAX_GRID, count - start), a_offset, b_offset, number * count, start)


def _batch_values(found: _Product, batches: _Batches, a: str, b: str) -> dict[str, int]:
    a_outer, a_inner = (0, *found.a.batch)[-2:]
    b_outer, b_inner = (0, *found.b.batch)[-2:]
    return {
        "batch_base": batches.base,
        "batch_start": batches.start,
        "batch_inner": found.batch[-1],
        f"{a}_outer": a_outer,
        f"{a}_inner": a_inner,
        f"{b}_outer": b_outer,
        f"{b}_inner": b_inner,
    }


def _lower_tiled(found: _Product, group: Group, lowering: Lowering, dialect: Dialect, dims: Dims) -> list[KernelCall]:
    a, b = found.a, found.b
    tile = tile_dtype(a.tensor.dtype, b.tensor.dtype)
    rows, columns = tile_rows(found.m), tile_columns(found.n)
    a_along_k = a.strides[1] == 1 or a.strides[0] != 1
    b_along_k = b.strides[0] == 1 and b.strides[1] != 1
    definitions = {
        "a_t": dialect.storage[a.tensor.dtype.name],
        "b_t": dialect.storage[b.tensor.dtype.name],
        "tile_t": dialect.storage[tile.name],
        "TILE_M": rows,
        "TILE_N": columns,
        "TILE_K": tile_depth(tile),
        "A_ALONG_K": int(a_along_k),
        "A_CHUNK": a.chunk(tile, found.k) if a_along_k else a.transposed.chunk(tile, found.m),
        "B_ALONG_K": int(b_along_k),
        "B_CHUNK": b.transposed.chunk(tile, found.k) if b_along_k else b.chunk(tile, found.n),
    }
    text = KernelText("matmul", 2, MATMUL_FIELDS, definitions, ("store.metal", "tile.metal"))
    kernel = anchor_kernel(text, group, lowering, dialect, dims)
    values = {
        "m": found.m, "n": found.n, "k": found.k,
        "a_row": a.strides[0], "a_k": a.strides[1], "b_k": b.strides[0], "b_col": b.strides[1],
    }  # fmt: skip
    grid = (-(-found.m // rows), -(-found.n // columns))
    return _launches(kernel, found, ("a", "b"), values, grid, TILE_THREADS)


def _lower_vector(found: _Product, group: Group, lowering: Lowering, dialect: Dialect, dims: Dims) -> list[KernelCall]:
    """A product with a vector on one side. The matrix is seen as [outputs, k], whichever side it is on."""
    is_row = found.m == 1
    matrix, vector = (found.b.transposed, found.a) if is_row else (found.a, found.b.transposed)
    outputs = found.n if is_row else found.m
    definitions: dict[str, object] = {
        "matrix_t": dialect.storage[matrix.tensor.dtype.name],
        "vector_t": dialect.storage[vector.tensor.dtype.name],
        "ROW(i)": "0" if is_row else "i",
        "COL(i)": "i" if is_row else "0",
    }
    values = {
        "outputs": outputs, "k": found.k,
        "matrix_row": matrix.strides[0], "matrix_k": matrix.strides[1], "vector_k": vector.strides[1],
    }  # fmt: skip
    names = ("vector", "matrix") if is_row else ("matrix", "vector")
    if matrix.strides[1] != 1:
        chunk = _chunk(matrix.strides[0], (matrix.offset, *matrix.batch, matrix.strides[1], outputs))
        definitions["CHUNK"] = chunk
        text = KernelText("matvec_columns", 2, MATVEC_FIELDS, definitions)
        kernel = anchor_kernel(text, group, lowering, dialect, dims)
        return _launches(kernel, found, names, values, (-(-outputs // (32 * chunk)), 1), 256)
    aligned = [matrix.offset, *matrix.batch, matrix.strides[0], found.k]
    if group.prologue:
        prologue, simdgroups, rounds = vector_prologue(group, lowering, dialect), PROLOGUE_SIMDGROUPS, _PROLOGUE_ROUNDS
        values["vector_k"] = 1
    else:
        prologue, simdgroups, rounds = None, _SIMDGROUPS, 1
        aligned += [vector.offset, *vector.batch]
    definitions |= {"CHUNK": _chunk(values["vector_k"], aligned), "SIMDGROUPS": simdgroups, "ROUNDS": rounds}
    text = KernelText("matvec", 1 if prologue else 2, MATVEC_FIELDS, definitions)
    kernel = anchor_kernel(text, group, lowering, dialect, dims, prologue)
    width = simdgroups * rounds * _SIMDGROUP_SUMS
    return _launches(kernel, found, names, values, (-(-outputs // width), 1), 32 * simdgroups)


def _chunk(contiguous: int, multiples: Sequence[int]) -> int:
    """Elements of a vector load where alignment allows it, else 1; see `tiles.chunk_of`."""
    return _VECTOR if contiguous == 1 and all(number % _VECTOR == 0 for number in multiples) else 1


def _launches(
    kernel: AnchorKernel,
    found: _Product,
    names: tuple[str, str],
    values: dict[str, int],
    grid: tuple[int, int],
    threads: int,
) -> list[KernelCall]:
    """The launches that cover the batch. `names` are what the kernel calls `a` and `b`; a matrix is bound first."""
    launches = []
    total = prod(found.batch)
    for batches in _batches(found):
        arguments = [found.a.argument(batches.a_offset), found.b.argument(batches.b_offset)]
        if names[1] == "matrix":
            arguments.reverse()
        if kernel.group.prologue:
            arguments.pop()
        flops = 2 * batches.count * found.m * found.n * found.k
        parameters = {**values, **_batch_values(found, batches, *names)}
        launches.append(
            kernel.launch(arguments, parameters, (*grid, batches.count), threads, flops, batches.count / total)
        )
    return launches
