"""Lowers matrix products: tiles for matrices, a parallel reduction for a vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from metal_compiler.anchors import anchor_epilogue, anchor_launch
from metal_compiler.dialect import METAL
from metal_compiler.products.codes import code_prologues
from metal_compiler.products.grouped_matvec import (
    CODE_MACROS,
    MAX_ROWS,
    group_prologue,
    lower_grouped_vectors,
    units_of,
)
from metal_compiler.products.prologue import row_groups, vector_prologue
from metal_compiler.tiles.tiling import (
    MAX_GRID,
    TILE_THREADS,
    Asked,
    best_tiling,
    chunk_of,
    tile_dtype,
)
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.dtypes import UINT8, DType
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.anchors import Epilogue
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Computed, Dequantised, GroupedCodes
from npu_compiler.lowering.problems.operand import are_chunks
from npu_compiler.lowering.problems.product import Matrix, Product
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch, Prologue

__all__ = ["MATMUL", "MATVEC", "MATVEC_COLUMNS", "lower_matmul"]

_BATCH_PARAMS = "batch_base, batch_start, batch_inner"
_MATVEC_BATCH = f"{_BATCH_PARAMS}, matrix_outer, matrix_inner, vector_outer, vector_inner"
_CODE_MACROS = "CODES? CODE_PARAMETERS? CODE_ARGUMENTS?"
_MATVEC_MACROS = f"matrix_t vector_t ROW(i) COL(i) CHUNK {_CODE_MACROS}"
MATMUL = KernelTemplate(
    "matmul",
    params=f"int m, n, k, a_row, a_k, b_k, b_col, {_BATCH_PARAMS}, a_outer, a_inner, b_outer, b_inner",
    macros=f"a_t b_t tile_t TILE_M TILE_N TILE_K A_ALONG_K A_CHUNK B_ALONG_K B_CHUNK CODES? {CODE_MACROS}",
    inputs="a b codes?",
    threads=TILE_THREADS,
    files="store.metal tile.metal",
    computed="codes",
)
MATVEC = KernelTemplate(
    "matvec",
    params=f"int outputs, k, matrix_row, vector_k, {_MATVEC_BATCH}",
    macros=f"{_MATVEC_MACROS} SIMDGROUPS ROUNDS PROLOGUE? COMPUTE_VECTOR? VECTOR_CAPACITY?",
    inputs="matrix vector codes?",
    threads=lambda macros: 32 * macros["SIMDGROUPS"],
    computed="vector codes",
)
MATVEC_COLUMNS = KernelTemplate(
    "matvec_columns",
    params=f"int outputs, k, matrix_row, matrix_k, vector_k, {_MATVEC_BATCH}",
    macros=_MATVEC_MACROS,
    inputs="matrix vector codes?",
    threads=256,
    computed="codes",
)

_VECTOR = 4  # elements of a vector load in the matrix-vector kernels


@dataclass(frozen=True)
class _Batches:
    """The part of the batch that one launch computes: the kernel's parameters, and where the operands begin."""

    count: int
    a_offset: int
    b_offset: int
    base: int
    start: int


@dataclass(frozen=True)
class _Use:
    """How a kernel is used for every part of the batch; `names` are what it calls `a` and `b`."""

    template: KernelTemplate
    macros: Mapping[str, object]
    values: Mapping[str, int]
    grid: tuple[int, int]
    names: tuple[str, str]
    prologues: Mapping[str, Prologue]


@lowering_of(Product)
def lower_matmul(found: Product, group: Group, lowering: Lowering) -> list[KernelCall]:
    """Matrix products of any strides: one launch, or several where more than two batch dimensions cannot be merged."""
    if isinstance(found.b.operand, GroupedCodes) and found.m <= MAX_ROWS:
        return lower_grouped_vectors(found, group, lowering)
    has_vector = found.m == 1 or (found.n == 1 and not isinstance(found.b.operand, GroupedCodes))
    lower = _lower_vector if has_vector else _lower_tiled
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
    codes = b.operand if isinstance(b.operand, GroupedCodes) else None
    tile = a.dtype if codes or isinstance(b.operand, Dequantised) else tile_dtype(a.dtype, b.dtype)
    tiling = best_tiling(Asked(found.m, found.n, found.k, found.batches, tile), lowering.device)
    a_along_k = a.k == 1 or a.along != 1
    b_along_k = b.k == 1 and b.along != 1
    macros = {
        **tiling.macros(a.dtype, UINT8 if codes else b.dtype, tile),
        "A_ALONG_K": int(a_along_k),
        "A_CHUNK": _tile_chunk(a, tile, a_along_k, found.k if a_along_k else found.m),
        "B_ALONG_K": int(b_along_k),
        "B_CHUNK": 1 if codes else _tile_chunk(b, tile, b_along_k, found.k if b_along_k else found.n),
    }
    grid = (ceil_div(found.m, tiling.rows), ceil_div(found.n, tiling.columns))
    if codes:
        prologues = {"codes": group_prologue(codes, units_of(codes, found.k)[-1], found.k)}
    else:
        prologues = code_prologues(found, lowering)
    use = _Use(MATMUL, macros, found.values(), grid, ("a", "b"), prologues)
    return _launches(use, found, anchor_epilogue(group, lowering), lowering)


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
    values = {"outputs": outputs, "k": found.k, "matrix_row": matrix.along, "vector_k": vector.k}
    macros: dict[str, object] = {
        "matrix_t": METAL.storage[matrix.dtype.name],
        "vector_t": METAL.storage[vector.dtype.name],
        "ROW(i)": "0" if is_row else "i",
        "COL(i)": "i" if is_row else "0",
    }
    names = ("vector", "matrix") if is_row else ("matrix", "vector")
    prologues = code_prologues(found, lowering)
    if matrix.k != 1:
        chunk = _VECTOR if matrix.has_chunks(_VECTOR, outputs, along_k=False) else 1
        values["matrix_k"] = matrix.k
        grid = (ceil_div(outputs, 32 * chunk), 1)
        use = _Use(MATVEC_COLUMNS, {**macros, "CHUNK": chunk}, values, grid, names, prologues)
        return _launches(use, found, anchor_epilogue(group, lowering), lowering)
    aligned = [*matrix.across(along_k=True), found.k]
    if isinstance(vector.operand, Computed):
        prologues["vector"] = vector_prologue(vector.operand, lowering)
        values["vector_k"] = 1
    else:
        aligned += [vector.offset, *vector.batch]
    chunk = _VECTOR if are_chunks(_VECTOR, values["vector_k"], aligned) else 1
    groups, shared = row_groups(outputs, is_computed="vector" in prologues)
    use = _Use(MATVEC, {**macros, "CHUNK": chunk, **shared}, values, (groups, 1), names, prologues)
    return _launches(use, found, anchor_epilogue(group, lowering), lowering)


def _launches(use: _Use, found: Product, fused: Epilogue, lowering: Lowering) -> list[KernelCall]:
    """The launches that cover the batch."""
    launches = []
    for batches in _batches(found):
        inputs = {use.names[1]: found.b.operand.argument_at(batches.b_offset)}
        if use.names[0] not in use.prologues:
            inputs[use.names[0]] = found.a.operand.argument_at(batches.a_offset)
        launch = Launch(
            use.template,
            grid=(*use.grid, batches.count),
            values={**use.values, **_batch_values(found, batches, *use.names)},
            macros=use.macros,
            inputs=inputs,
            flops=2 * batches.count * found.m * found.n * found.k,
            prologues=use.prologues,
            share=batches.count / found.batches,
        )
        launches.append(anchor_launch(launch, fused, lowering))
    return launches
