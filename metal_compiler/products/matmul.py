"""Lowers matrix products: tiles for matrices, a parallel reduction for a vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from metal_compiler.anchors import AnchorKernel, KernelText, anchor_kernel
from metal_compiler.dialect import METAL
from metal_compiler.products.codes import code_prologues
from metal_compiler.products.prologue import PROLOGUE_SIMDGROUPS, vector_prologue
from metal_compiler.tiles.tiling import (
    MAX_GRID,
    TILE_THREADS,
    Asked,
    best_tiling,
    chunk_of,
    tile_dtype,
)
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Computed, Dequantised
from npu_compiler.lowering.problems.operand import are_chunks
from npu_compiler.lowering.problems.product import Matrix, Product
from npu_compiler.lowering.target import Lowering, lowering_of

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
class _Batches:
    """The part of the batch that one launch computes: the kernel's parameters, and where the operands begin."""

    count: int
    a_offset: int
    b_offset: int
    base: int
    start: int


@lowering_of(Product)
def lower_matmul(found: Product, group: Group, lowering: Lowering) -> list[KernelCall]:
    """Matrix products of any strides: one launch, or several where more than two batch dimensions cannot be merged."""
    lower = _lower_vector if found.m == 1 or found.n == 1 else _lower_tiled
    return lower(found, group, lowering)


def _batches(found: Product) -> Iterator[_Batches]:
    """One entry for each launch: the grid counts two batch dimensions and at most 65535 products."""
    outer, inner = found.batch[:-2], found.batch[-2:]
    count = prod(inner)
    for number, position in enumerate(product(*map(range, outer))):
        a_offset = sum(i * stride for i, stride in zip(position, found.a.batch, strict=False))
        b_offset = sum(i * stride for i, stride in zip(position, found.b.batch, strict=False))
        for start in range(0, count, MAX_GRID):
            yield _Batches(min(MAX_GRID, count - start), a_offset, b_offset, number * count, start)


def _batch_values(found: Product, batches: _Batches, a: str, b: str) -> dict[str, int]:
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


def _lower_tiled(found: Product, group: Group, lowering: Lowering) -> list[KernelCall]:
    a, b = found.a, found.b
    tile = a.dtype if isinstance(b.operand, Dequantised) else tile_dtype(a.dtype, b.dtype)
    tiling = best_tiling(Asked(found.m, found.n, found.k, found.batches, tile), lowering.device)
    a_along_k = a.k == 1 or a.along != 1
    b_along_k = b.k == 1 and b.along != 1
    definitions = {
        "a_t": METAL.storage[a.dtype.name],
        "b_t": METAL.storage[b.dtype.name],
        "tile_t": METAL.storage[tile.name],
        "TILE_M": tiling.rows,
        "TILE_N": tiling.columns,
        "TILE_K": tiling.depth,
        "A_ALONG_K": int(a_along_k),
        "A_CHUNK": _tile_chunk(a, tile, a_along_k, found.k if a_along_k else found.m),
        "B_ALONG_K": int(b_along_k),
        "B_CHUNK": _tile_chunk(b, tile, b_along_k, found.k if b_along_k else found.n),
    }
    text = KernelText("matmul", 2, MATMUL_FIELDS, definitions, ("store.metal", "tile.metal"))
    kernel = anchor_kernel(text, group, lowering, code_prologues(found, lowering))
    values = {
        "m": found.m, "n": found.n, "k": found.k,
        "a_row": a.along, "a_k": a.k, "b_k": b.k, "b_col": b.along,
    }  # fmt: skip
    grid = (ceil_div(found.m, tiling.rows), ceil_div(found.n, tiling.columns))
    return _launches(kernel, found, ("a", "b"), values, grid, TILE_THREADS)


def _tile_chunk(operand: Matrix, tile: DType, along_k: bool, extent: int) -> int:
    """Elements of an operand that a tiled kernel copies at a time, along k or along the other dimension."""
    step = operand.k if along_k else operand.along
    if isinstance(operand.operand, Dequantised):
        return _VECTOR if operand.has_chunks(_VECTOR, extent, along_k) else 1
    return chunk_of(operand.dtype, tile, step, (*operand.across(along_k), extent))


def _lower_vector(found: Product, group: Group, lowering: Lowering) -> list[KernelCall]:
    """A product with a vector on one side. The matrix is seen as [outputs, k], whichever side it is on."""
    is_row = found.m == 1
    matrix, vector = (found.b, found.a) if is_row else (found.a, found.b)
    outputs = found.n if is_row else found.m
    definitions: dict[str, object] = {
        "matrix_t": METAL.storage[matrix.dtype.name],
        "vector_t": METAL.storage[vector.dtype.name],
        "ROW(i)": "0" if is_row else "i",
        "COL(i)": "i" if is_row else "0",
    }
    values = {
        "outputs": outputs, "k": found.k,
        "matrix_row": matrix.along, "matrix_k": matrix.k, "vector_k": vector.k,
    }  # fmt: skip
    names = ("vector", "matrix") if is_row else ("matrix", "vector")
    prologues = code_prologues(found, lowering)
    if matrix.k != 1:
        chunk = _VECTOR if matrix.has_chunks(_VECTOR, outputs, along_k=False) else 1
        definitions["CHUNK"] = chunk
        text = KernelText("matvec_columns", 2, MATVEC_FIELDS, definitions)
        kernel = anchor_kernel(text, group, lowering, prologues)
        return _launches(kernel, found, names, values, (ceil_div(outputs, 32 * chunk), 1), 256)
    aligned = [*matrix.across(along_k=True), found.k]
    if isinstance(vector.operand, Computed):
        prologues.append(vector_prologue(vector.operand, lowering))
        simdgroups, rounds = PROLOGUE_SIMDGROUPS, _PROLOGUE_ROUNDS
        values["vector_k"] = 1
    else:
        simdgroups, rounds = _SIMDGROUPS, 1
        aligned += [vector.offset, *vector.batch]
    chunk = _VECTOR if are_chunks(_VECTOR, values["vector_k"], aligned) else 1
    definitions |= {"CHUNK": chunk, "SIMDGROUPS": simdgroups, "ROUNDS": rounds}
    text = KernelText("matvec", 1 if isinstance(vector.operand, Computed) else 2, MATVEC_FIELDS, definitions)
    kernel = anchor_kernel(text, group, lowering, prologues)
    width = simdgroups * rounds * _SIMDGROUP_SUMS
    return _launches(kernel, found, names, values, (ceil_div(outputs, width), 1), 32 * simdgroups)


def _launches(
    kernel: AnchorKernel,
    found: Product,
    names: tuple[str, str],
    values: dict[str, int],
    grid: tuple[int, int],
    threads: int,
) -> list[KernelCall]:
    """The launches that cover the batch. `names` are what the kernel calls `a` and `b`; a matrix is bound first."""
    launches = []
    for batches in _batches(found):
        arguments = [found.a.operand.argument_at(batches.a_offset), found.b.operand.argument_at(batches.b_offset)]
        if names[1] == "matrix":
            arguments.reverse()
        if isinstance(found.a.operand, Computed):
            arguments.pop()
        flops = 2 * batches.count * found.m * found.n * found.k
        parameters = {**values, **_batch_values(found, batches, *names)}
        launches.append(
            kernel.launch(arguments, parameters, (*grid, batches.count), threads, flops, batches.count / found.batches)
        )
    return launches
