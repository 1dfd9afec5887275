"""What attention reads, as every target's lowering sees it before it divides the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_compiler.artifact.plan import Argument
from npu_compiler.dtypes import DType
from npu_compiler.lowering.operands import MAX_ELEMENTS
from npu_compiler.tensor.expr import Ref
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.trace import Anchor, TracedTensor
from npu_compiler.tensor.view import View

__all__ = ["AttentionOperand", "AttentionProblem"]

_MAX_HEAD_SIZE = 256


@dataclass(frozen=True)
class AttentionOperand:
    """A tensor [batch, heads, rows, size] as a kernel reads it."""

    tensor: TracedTensor
    view: View

    @property
    def argument(self) -> Argument:
        return Argument(self.tensor.index, self.view.offset * self.tensor.dtype.size)

    def has_chunks(self, count: int) -> bool:
        """Whether every row is whole chunks of `count` neighbours, each at a multiple of that."""
        *outer, step = self.view.strides
        return step == 1 and all(number % count == 0 for number in (self.view.offset, self.view.shape[-1], *outer))

    def strides(self, name: str) -> dict[str, int]:
        """Elements from one batch, head, row and element to the next, by the names of a kernel's parameters."""
        parts = ("batch", "head", "row", "step")
        return {f"{name}_{part}": stride for part, stride in zip(parts, self.view.strides, strict=True)}


@dataclass(frozen=True)
class AttentionProblem:
    """``softmax(q @ k.T * scale + mask) @ v``; several heads of queries may share a head of keys and values.

    Attributes:
        q: [batch, heads, rows, size].
        k, v: [batch, groups, length, size], [batch, groups, length, value size].
        mask: [batch, heads, rows, length], booleans or numbers to add; None without.
        scale: Factor of the scores.
        causal: Whether row i is closed from position i + 1 on.
    """

    q: AttentionOperand
    k: AttentionOperand
    v: AttentionOperand
    mask: AttentionOperand | None
    scale: float
    causal: bool

    @classmethod
    def of(cls, anchor: Anchor, tensors: Sequence[TracedTensor]) -> AttentionProblem:
        """The problem that an anchor poses.

        Raises:
            OpRefusal: A head is larger than 256 or empty, there is no position, or a tensor is too large.
        """
        q, k, v, *masks = (_operand(ref, tensors) for ref in anchor.operands)
        mask = masks[0] if masks else None
        problem = cls(q, k, v, mask, float(anchor.attrs["scale"]), bool(anchor.attrs["causal"]))
        sizes = problem.size, problem.value_size
        if min(*sizes, problem.length) < 1 or max(sizes) > _MAX_HEAD_SIZE:
            given = f"heads of {sizes[0]} and {sizes[1]} over {problem.length} positions"
            raise OpRefusal(f"given {given}, expected heads of 1 to {_MAX_HEAD_SIZE} and at least one position")
        return problem

    @property
    def dtypes(self) -> set[DType]:
        """Of queries, keys and values."""
        return {operand.tensor.dtype for operand in (self.q, self.k, self.v)}

    @property
    def batch(self) -> int:
        return self.q.view.shape[0]

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.k.view.shape[1]

    @property
    def shared(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.q.view.shape[1] // self.groups

    @property
    def rows(self) -> int:
        """Rows of a query head."""
        return self.q.view.shape[2]

    @property
    def length(self) -> int:
        """Positions of keys and values."""
        return self.k.view.shape[2]

    @property
    def size(self) -> int:
        return self.q.view.shape[3]

    @property
    def value_size(self) -> int:
        return self.v.view.shape[3]

    @property
    def flops(self) -> int:
        """Arithmetic of both products, whatever a mask closes."""
        rows = self.batch * self.q.view.shape[1] * self.rows
        return 2 * rows * self.length * (self.size + self.value_size)


def _operand(ref: Ref, tensors: Sequence[TracedTensor]) -> AttentionOperand:
    tensor = tensors[ref.tensor]
    if tensor.layout.size >= MAX_ELEMENTS:
        raise OpRefusal(f"'{tensor.name}' has {tensor.layout.size} elements, more than kernels address (2^31)")
    return AttentionOperand(tensor, ref.view)
