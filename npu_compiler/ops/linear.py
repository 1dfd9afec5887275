"""Matrix products. Everything around the product itself is an expression that fuses into its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from npu_compiler.dtypes import DType, promote
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import Passage, RowCall, RowRule
from npu_compiler.ops.traits import Term, Work
from npu_compiler.tensor.shapes import broadcast_shapes
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, refuse_codes


def product(a: Tensor, b: Tensor, dtype: DType | None = None) -> Tensor:
    """``a @ b`` for matrices, with leading dimensions that broadcast: [..., M, K] by [..., K, N] gives [..., M, N].

    Its data type is that of both operands, if no other is given.
    """
    if a.shape[-1] != b.shape[-2]:
        raise OpRefusal(f"the shapes {list(a.shape)} and {list(b.shape)} cannot be multiplied")
    refuse_codes(a)
    refuse_codes(b)
    if not (a.dtype.is_float and b.dtype.is_float):
        raise OpRefusal(f"given {a.dtype} and {b.dtype}, expected floating point")
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    dtype = dtype or promote(a.dtype, b.dtype)
    left, right = a.expand((*batch, *a.shape[-2:])), b.expand((*batch, *b.shape[-2:]))
    shape = (*batch, a.shape[-2], b.shape[-1])
    return a.trace.anchor("matmul", (left, right), shape, dtype)


def flops(operands: Sequence[tuple[int, ...]], made: int) -> int | None:
    """A multiplication and an addition for each column of the left matrix, the first operand."""
    return 2 * made * operands[0][-1] if operands[0] else None


def flops_beside_sum(operands: Sequence[tuple[int, ...]], made: int) -> int | None:
    """The same where the first operand is added, and the left matrix is the second."""
    return 2 * made * operands[1][-1] if len(operands) == 3 else None


def _multiplied(left: str, right: str, added: str = "") -> RowRule:
    """Rows of the left matrix; of dimensions ahead of both matrices, those of each that has them."""

    def rule(call: RowCall) -> Passage | None:
        if call.dim == call.rank - 1 or min(len(call.shape(left)), len(call.shape(right))) < 2:
            return None
        dims = call.broadcast(left)
        dims |= call.broadcast(right) if call.dim < call.rank - 2 else {}
        return Passage(dims | (call.broadcast(added) if added else {}))

    return rule


def _rows_of_input(call: RowCall) -> Passage | None:
    return Passage({"input": call.dim}) if call.dim < call.rank - 1 else None


def _is_unscaled(node: OpNode, graph: IRGraph) -> bool:
    return all(node.attrs.get(key, 1) == 1 for key in ("alpha", "beta"))


_LINEAR = Term("linear", ("input", "weight", "bias"))
multiplication = partial(op, work=Work.ANCHOR, flops=flops)


@multiplication("aten.linear.default", rows=_rows_of_input, is_learned=True, term=_LINEAR)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``, over the last dimension of `input`."""
    rows = input.reshape((-1, input.shape[-1])) if len(input.shape) > 2 else input
    matrix = rows if len(rows.shape) == 2 else rows.reshape((1, -1))
    result = product(matrix, weight.swap(0, 1))
    if bias is not None:
        result = result + bias
    return result.realize().reshape((*input.shape[:-1], weight.shape[0]))


@multiplication(
    "aten.matmul.default", "aten.linalg_matmul.default",
    rows=_multiplied("self", "other"), term=Term("matmul", ("self", "other")),
)  # fmt: skip
def matmul(self: Tensor, other: Tensor) -> Tensor:
    """The product of vectors, matrices or batches of matrices, as numpy's ``@``."""
    if not self.shape or not other.shape:
        raise OpRefusal("a scalar cannot be multiplied as a matrix")
    a = self if len(self.shape) > 1 else self.reshape((1, -1))
    b = other if len(other.shape) > 1 else other.reshape((-1, 1))
    if len(b.shape) == 2 and len(a.shape) > 2:  # the leading dimensions are rows of one product
        result = product(a.reshape((-1, a.shape[-1])), b).reshape((*a.shape[:-1], b.shape[-1]))
    else:
        result = product(a, b)
    shape = list(result.shape)
    if len(other.shape) == 1:
        shape.pop(-1)
    if len(self.shape) == 1:
        shape.pop(-1 if len(other.shape) == 1 else -2)
    return result.reshape(shape)


@multiplication("aten.mv.default")
def mv(self: Tensor, vec: Tensor) -> Tensor:
    """The product of a matrix and a vector."""
    return matmul(self, vec)


@multiplication("aten.dot.default", "aten.vdot.default")
def dot(self: Tensor, tensor: Tensor) -> Tensor:
    """The product of two vectors, a number."""
    return matmul(self, tensor)


@op("aten.outer.default", "aten.ger.default")
def outer(self: Tensor, vec2: Tensor) -> Tensor:
    """Of two vectors the products of each with each: [M] and [N] give [M, N]."""
    return self.reshape((-1, 1)) * vec2


@multiplication(
    "aten.mm.default", "aten.bmm.default", rows=_multiplied("self", "mat2"), term=Term("mm", ("self", "mat2"))
)
def mm(self: Tensor, mat2: Tensor) -> Tensor:
    """The product of two matrices, or of two batches of matrices."""
    if len(self.shape) != len(mat2.shape) or len(self.shape) not in (2, 3):
        raise OpRefusal(
            f"the shapes {list(self.shape)} and {list(mat2.shape)} are not both matrices or batches of them"
        )
    return product(self, mat2)


@multiplication(
    "aten.addmm.default",
    "aten.addmm_.default",
    rows=_multiplied("mat1", "mat2", "self"),
    term=Term("addmm", ("self", "mat1", "mat2"), holds=_is_unscaled),
    is_learned=True,
    flops=flops_beside_sum,
)
def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * self + alpha * mat1 @ mat2``."""
    result = product(mat1, mat2)
    if alpha != 1:
        result = result * alpha
    return result if beta == 0 else result + (self if beta == 1 else self * beta)


@multiplication(
    "aten.baddbmm.default", "aten.baddbmm_.default",
    rows=_multiplied("batch1", "batch2", "self"), flops=flops_beside_sum,
)  # fmt: skip
def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, beta: Number = 1, alpha: Number = 1) -> Tensor:
    """``beta * self + alpha * batch1 @ batch2``, for batches of matrices."""
    return addmm(self, batch1, batch2, beta, alpha)
