"""Matrix products as kernels see them: two operands with strides, and a merged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cuda_compiler.anchors import anchor_source
from npu_compiler.artifact.plan import Argument
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.operands import MAX_ELEMENTS
from npu_compiler.lowering.target import Lowering
from npu_compiler.tensor.expr import Ref
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import collapse

__all__ = ["Matrix", "Product", "offset_function", "product_of"]

_CHUNK = 8  # elements of 16 bytes


@dataclass(frozen=True)
class Matrix:
    """An operand, as [along, k]: its tensor, where it begins, its strides, and those along the merged batch."""

    tensor: TracedTensor
    offset: int
    along: int
    k: int
    batch: tuple[int, ...]

    @property
    def argument(self) -> Argument:
        return Argument(self.tensor.index, self.offset * self.tensor.dtype.size)

    @property
    def is_constant(self) -> bool:
        """Whether no kernel of the plan writes it."""
        return self.tensor.source is None

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
class Product:
    """``a @ b``: [m, k] by [k, n] for each position of the merged batch dimensions."""

    a: Matrix
    b: Matrix
    m: int
    n: int
    k: int
    batch: tuple[int, ...]

    @property
    def flops(self) -> int:
        return 2 * prod(self.batch) * self.m * self.n * self.k

    @property
    def fits_tiles(self) -> bool:
        """Whether both operands are of the same 16-bit type and read 16 bytes at a time."""
        dtype = self.a.tensor.dtype
        half = dtype == self.b.tensor.dtype and dtype in (FLOAT16, BFLOAT16)
        return half and self.a.fits_chunks(self.m, self.k) and self.b.fits_chunks(self.n, self.k)

    @property
    def along_k(self) -> bool:
        """Whether neighbours in memory are neighbours along k, in both operands."""
        return self.a.k == self.b.k == 1


def product_of(group: Group, lowering: Lowering) -> Product:
    """The product that a group is built around.

    Raises:
        OpRefusal: An operand is too large.
    """
    left, right = anchor_source(group).operands
    *batch_shape, m, results = group.shape
    batch, (a_batch, b_batch) = collapse(tuple(batch_shape), [left.view.strides[:-2], right.view.strides[:-2]])
    a = _matrix(lowering.tensors[left.tensor], left, (-2, -1), a_batch)
    b = _matrix(lowering.tensors[right.tensor], right, (-1, -2), b_batch)
    for operand in (a, b):
        if operand.tensor.layout.size >= MAX_ELEMENTS:
            raise OpRefusal(f"'{operand.tensor.name}' has {operand.tensor.layout.size} elements, at most 2^31 are read")
    return Product(a, b, m, results * group.pairs, left.view.shape[-1], batch)


def _matrix(tensor: TracedTensor, ref: Ref, dims: tuple[int, int], batch: tuple[int, ...]) -> Matrix:
    """An operand; a dimension of one element has no stride of its own and takes whichever suits."""
    along, k = (ref.view.strides[dim] for dim in dims)
    if ref.view.shape[dims[1]] == 1 and along != 1:
        k = 1
    if ref.view.shape[dims[0]] == 1 and k == 1:
        along = 0
    return Matrix(tensor, ref.view.offset, along, k, batch)


def offset_function(name: str, batch: Sequence[int], strides: Sequence[int]) -> str:
    """A device function ``name_offset`` that gives where an operand begins, from the position in the batch."""
    lines = [f"__device__ __forceinline__ long long {name}_offset(int batch, const Params& p)", "{"]
    terms = []
    for dim in range(len(batch) - 1, 0, -1):
        lines += [f"    int i{dim} = batch % {batch[dim]};", f"    batch /= {batch[dim]};"]
        terms.append(f"(long long)i{dim} * {strides[dim]}")
    terms.append(f"(long long)batch * {strides[0]}")
    return "\n".join([*lines, f"    return {' + '.join(terms)};", "}"])
