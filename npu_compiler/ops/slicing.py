"""Elements in other places, by position alone: reversed dimensions, diagonals, windows, pieces and joints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod

from npu_compiler.dtypes import INT64
from npu_compiler.ops import lenses
from npu_compiler.ops.indexing import cat, stack
from npu_compiler.ops.reduction import total
from npu_compiler.ops.registry import op, view
from npu_compiler.ops.rows import apart_from_dim
from npu_compiler.ops.traits import Work
from npu_compiler.ops.views import chunk, narrow, split, split_with_sizes, unbind
from npu_compiler.tensor.reducing import reduce
from npu_compiler.tensor.shapes import normalize_dim
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange, full, where

_copy = partial(op, work=Work.VIEW)
"""Registers an op that gives the same elements in memory of their own."""


def copied(x: Tensor) -> Tensor:
    """The same elements, which are copied where something other than a generated kernel reads them."""
    return x.with_expr(x.expr)


# ---- reversed and turned


@op("aten.flip.default")
def flip(self: Tensor, dims: Sequence[int]) -> Tensor:
    """The elements of some dimensions in reverse order."""
    for dim in {normalize_dim(dim, len(self.shape)) for dim in dims} if self.shape else ():
        self = self.slice(dim, self.shape[dim] - 1, self.shape[dim], -1)
    return copied(self)


@op("aten.fliplr.default")
def fliplr(self: Tensor) -> Tensor:
    """The columns in reverse order."""
    return flip(self, (1,))


@op("aten.flipud.default")
def flipud(self: Tensor) -> Tensor:
    """The rows in reverse order."""
    return flip(self, (0,))


@op("aten.rot90.default")
def rot90(self: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Turned by `k` times 90 degrees, from the first of two dimensions towards the second."""
    first, second = (normalize_dim(dim, len(self.shape)) for dim in dims)
    match k % 4:
        case 1:
            return flip(self, (second,)).swap(first, second)
        case 2:
            return flip(self, (first, second))
        case 3:
            return flip(self, (first,)).swap(first, second)
    return copied(self)


# ---- diagonals


@view("aten.diagonal.default", lenses=lenses.diagonal)
def diagonal(self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The elements whose positions along two dimensions are `offset` apart, as the last dimension."""
    rank = len(self.shape)
    first, second = normalize_dim(dim1, rank), normalize_dim(dim2, rank)
    if first == second or rank < 2:
        raise OpRefusal(f"given dim1={dim1} and dim2={dim2} of {rank} dimensions, expected two of them")
    matrix = self.permute([*(d for d in range(rank) if d not in (first, second)), first, second])
    *outer, rows, columns = matrix.shape
    top, left = max(0, -offset), max(0, offset)
    length = max(0, min(rows - top, columns - left))
    if not length:
        return full(self.trace, (*outer, 0), 0, self.dtype)
    flat = matrix.reshape((*outer, rows * columns))
    return flat.slice(-1, top * columns + left, length, columns + 1)


@_copy("aten.diagonal_copy.default")
def diagonal_copy(self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The elements whose positions along two dimensions are `offset` apart, in memory of their own."""
    return copied(diagonal(self, offset, dim1, dim2))


@op("aten.diag_embed.default")
def diag_embed(self: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Matrices, zero but for a diagonal: the last dimension of `self`. `dim1` and `dim2` are theirs in the result."""
    size = self.shape[-1] + abs(offset)
    rank = len(self.shape) + 1
    first, second = normalize_dim(dim1, rank), normalize_dim(dim2, rank)
    rows, columns = arange(self.trace, size).reshape((size, 1)), arange(self.trace, size)
    values = self.realize().slice(-1, -max(0, offset), size)  # read only where the position is on the diagonal
    values = values.reshape((*self.shape[:-1], 1, size))
    if not self.shape[-1]:
        matrix = full(self.trace, (*self.shape[:-1], size, size), 0, self.dtype)
    else:
        matrix = where(apply("eq", columns - rows, offset), values, full(self.trace, (), 0, self.dtype))
    order = [d for d in range(rank) if d not in (first, second)]
    order = [*order, first, second]
    return matrix.permute(sorted(range(rank), key=order.__getitem__))


@op("aten.diag.default")
def diag(self: Tensor, diagonal: int = 0) -> Tensor:
    """Of a vector the matrix with it as a diagonal, of a matrix a diagonal."""
    return diag_embed(self, diagonal) if len(self.shape) == 1 else copied(_diagonal(self, diagonal))


_diagonal = diagonal


@op("aten.diagflat.default")
def diagflat(self: Tensor, offset: int = 0) -> Tensor:
    """The matrix with all elements in row-major order as a diagonal."""
    return diag_embed(self.reshape((prod(self.shape),)), offset)


@op("aten.trace.default", work=Work.ROWS)
def trace_of(self: Tensor) -> Tensor:
    """The sum of the diagonal of a matrix."""
    kind = self.dtype if self.dtype.is_float else INT64
    return reduce(diagonal(self), total, (0,), False, kind)[0]


@op("aten.block_diag.default")
def block_diag(tensors: Sequence[Tensor]) -> Tensor:
    """A matrix, zero but for blocks along its diagonal."""
    blocks = [t.reshape((1,) * (2 - len(t.shape)) + t.shape) for t in tensors]
    width, left, rows = sum(block.shape[1] for block in blocks), 0, []
    for block in blocks:
        height, own = block.shape
        sides = (full(block.trace, (height, size), 0, block.dtype) for size in (left, width - left - own))
        before, after = sides
        rows.append(cat([part for part in (before, block, after) if part.shape[1]] or [block], 1))
        left += own
    return cat(rows, 0)


# ---- windows


@view("aten.unfold.default", lenses=lenses.windows)
def unfold(self: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows of `size` elements along a dimension, `step` apart; their elements are the last dimension."""
    if not self.shape:
        return copied(self.reshape((1,)))
    dim = normalize_dim(dimension, len(self.shape))
    if step < 1 or not 0 <= size <= self.shape[dim]:
        raise OpRefusal(f"given windows of {size}, {step} apart, along a dimension of {self.shape[dim]}")
    return copied(self.window(dim, (self.shape[dim] - size) // step + 1, step, size))


@_copy("aten.unfold_copy.default")
def unfold_copy(self: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows along a dimension, in memory of their own."""
    return unfold(self, dimension, size, step)


# ---- pieces and joints


def _sections(x: Tensor, parts: int, dim: int) -> tuple[Tensor, ...]:
    """So many pieces along a dimension, of which the first may be longer by one."""
    size = x.shape[normalize_dim(dim, len(x.shape))]
    if parts < 1:
        raise OpRefusal(f"given {parts} pieces, expected at least 1")
    short, longer = divmod(size, parts)
    return split_with_sizes(x, [short + (i < longer) for i in range(parts)], dim)


def _cuts(x: Tensor, indices: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """The pieces between positions along a dimension, cut as Python cuts lists."""
    size = x.shape[normalize_dim(dim, len(x.shape))]
    borders = [0, *(min(size, max(0, i + size if i < 0 else i)) for i in indices), size]
    return tuple(x.slice(dim, first, max(0, last - first)) for first, last in pairwise(borders))


@view("aten.tensor_split.sections", lenses=lenses.pieces, rows=apart_from_dim)
def tensor_split(self: Tensor, sections: int, dim: int = 0) -> tuple[Tensor, ...]:
    """So many pieces along a dimension, of which the first are longer by one where it does not divide."""
    return _sections(self, sections, dim)


@view("aten.tensor_split.indices", lenses=lenses.pieces, rows=apart_from_dim)
def tensor_split_at(self: Tensor, indices: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """The pieces of a dimension between positions."""
    return _cuts(self, indices, dim)


def _splitting(name: str, dim: int, most: str) -> None:
    """Registers the pieces of `tensor_split` along a fixed dimension."""

    def own(x: Tensor) -> int:
        return 0 if name == "hsplit" and len(x.shape) == 1 else dim

    def sections_of(self: Tensor, sections: int) -> tuple[Tensor, ...]:
        return _sections(self, sections, own(self))

    def at(self: Tensor, indices: Sequence[int]) -> tuple[Tensor, ...]:
        return _cuts(self, indices, own(self))

    sections_of.__doc__ = f"So many pieces of the {most}."
    at.__doc__ = f"The pieces of the {most} between positions."
    view(f"aten.{name}.int")(sections_of)
    view(f"aten.{name}.array")(at)


for _name, _dim, _words in (("hsplit", 1, "columns"), ("vsplit", 0, "rows"), ("dsplit", 2, "third dimension")):
    _splitting(_name, _dim, _words)


@view("aten.split.sizes", lenses=lenses.pieces, rows=apart_from_dim)
def split_sizes(self: Tensor, split_size: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of the given sizes along a dimension."""
    return split_with_sizes(self, split_size, dim)


@_copy("aten.split_copy.Tensor", "aten.unsafe_split.Tensor")
def split_copy(self: Tensor, split_size: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of `split_size` along a dimension, in memory of their own; the last may be smaller."""
    return tuple(map(copied, split(self, split_size, dim)))


@_copy("aten.split_with_sizes_copy.default", "aten.unsafe_split_with_sizes.default")
def split_with_sizes_copy(self: Tensor, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of the given sizes along a dimension, in memory of their own."""
    return tuple(map(copied, split_with_sizes(self, split_sizes, dim)))


@_copy("aten.unsafe_chunk.default")
def unsafe_chunk(self: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """At most `chunks` pieces of equal size along a dimension, in memory of their own."""
    return tuple(map(copied, chunk(self, chunks, dim)))


@_copy("aten.unbind_copy.int")
def unbind_copy(self: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Every position of a dimension as a tensor of its own, in memory of its own."""
    return tuple(map(copied, unbind(self, dim)))


@_copy("aten.narrow_copy.default")
def narrow_copy(self: Tensor, dim: int, start: int, length: int) -> Tensor:
    """`length` elements of a dimension, in memory of their own."""
    return copied(narrow(self, dim, start, length))


def _at_least(x: Tensor, rank: int) -> Tensor:
    """With dimensions of size 1, as PyTorch places them, up to a rank."""
    if len(x.shape) >= rank:
        return x
    if rank == 3:
        return x.reshape((1, prod(x.shape), 1) if len(x.shape) < 2 else (*x.shape, 1))
    return x.reshape((*(1,) * (rank - len(x.shape)), *x.shape))


@view("aten.atleast_1d.default", lenses=lenses.reshaped, keeps_order=True)
def atleast_1d(self: Tensor) -> Tensor:
    """With one dimension at least."""
    return _at_least(self, 1)


@view("aten.atleast_2d.default", lenses=lenses.reshaped, keeps_order=True)
def atleast_2d(self: Tensor) -> Tensor:
    """With two dimensions at least."""
    return _at_least(self, 2)


@view("aten.atleast_3d.default", lenses=lenses.reshaped, keeps_order=True)
def atleast_3d(self: Tensor) -> Tensor:
    """With three dimensions at least."""
    return _at_least(self, 3)


@view("aten.ravel.default", lenses=lenses.reshaped, keeps_order=True)
def ravel(self: Tensor) -> Tensor:
    """All elements in row-major order."""
    return self.reshape((prod(self.shape),))


@op("aten.hstack.default")
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors side by side: along the columns, of vectors one after another."""
    parts = [_at_least(t, 1) for t in tensors]
    return cat(parts, 0 if len(parts[0].shape) == 1 else 1)


@op("aten.vstack.default", "aten.row_stack.default")
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors below one another: along the rows."""
    return cat([_at_least(t, 2) for t in tensors], 0)


@op("aten.dstack.default")
def dstack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors behind one another: along the third dimension."""
    return cat([_at_least(t, 3) for t in tensors], 2)


@op("aten.column_stack.default")
def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors side by side, each vector as a column."""
    return cat([t if len(t.shape) > 1 else t.reshape((prod(t.shape), 1)) for t in tensors], 1)


@view("aten.meshgrid.indexing", "aten.meshgrid.default")
def meshgrid(tensors: Sequence[Tensor], indexing: str = "ij") -> tuple[Tensor, ...]:
    """The coordinates of a grid: each vector along a dimension of its own, repeated along the others."""
    if indexing not in ("ij", "xy"):
        raise OpRefusal(f"given indexing='{indexing}', expected 'ij' or 'xy'")
    order = [*range(len(tensors))]
    if indexing == "xy" and len(order) > 1:
        order[:2] = 1, 0
    sizes = [prod(tensors[i].shape) for i in order]
    grids = []
    for number, tensor in enumerate(tensors):
        place = order.index(number)
        shape = [size if dim == place else 1 for dim, size in enumerate(sizes)]
        grids.append(tensor.reshape(shape).expand(sizes))
    return tuple(grids)


@view("aten.broadcast_tensors.default")
def broadcast_tensors(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor repeated to the shape that all of them broadcast to."""
    rank = max((len(tensor.shape) for tensor in tensors), default=0)
    shapes = [(1,) * (rank - len(tensor.shape)) + tuple(tensor.shape) for tensor in tensors]
    sizes = [next((n for n in column if n != 1), 1) for column in zip(*shapes, strict=True)]
    if any(n not in (1, size) for shape in shapes for n, size in zip(shape, sizes, strict=True)):
        raise OpRefusal(f"given the shapes {[list(tensor.shape) for tensor in tensors]}, which do not broadcast")
    return tuple(tensor.reshape(shape).expand(sizes) for tensor, shape in zip(tensors, shapes, strict=True))


@op("aten.cartesian_prod.default")
def cartesian_prod(tensors: Sequence[Tensor]) -> Tensor:
    """All combinations of the elements of vectors, one in each row; of a single vector itself."""
    if len(tensors) == 1:
        return tensors[0]
    return stack([ravel(grid) for grid in meshgrid(tensors)], 1)
