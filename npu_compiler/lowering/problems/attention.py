"""What attention reads, as every target's lowering sees it before it divides the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from npu_compiler.dtypes import DType
from npu_compiler.lowering.problems.operand import Operand, named_strides
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.tensor.symbolic import OpRefusal
from npu_compiler.tensor.trace import MAX_HEAD_SIZE, Anchor, TracedTensor

__all__ = ["Attention"]

_MAX_HEADS = 65535  # of keys in all the batch: what a grid counts along its later dimensions
_DIMENSIONS = ("batch", "head", "row", "step")


@dataclass(frozen=True)
class Attention(Problem):
    """``softmax(cap(q @ k.T * scale) + mask) @ v``; several heads of queries may share a head of keys and values.

    Attributes:
        q: [batch, heads, rows, size].
        k, v: [batch, groups, length, size], [batch, groups, length, value size].
        mask: [batch, heads, rows, length], booleans or numbers to add, or those of the first elements of the batch,
            which the others have again and again; None without.
        scale: Factor of the scores.
        cap: Where it is not 0, scores x become ``tanh(x / cap) * cap``.
        causal: Whether row i is closed from position i + 1 on.
        sinks: [heads], a score of each head that takes its share of the weights, ``exp(sink)`` in the denominator, and
            brings no value; None without.
    """

    kind = "attention"
    operand_names = ("q", "k", "v", "mask", "sinks")
    dims = (0, 1), (2,), (3,)

    q: Operand
    k: Operand
    v: Operand
    mask: Operand | None
    scale: float
    causal: bool
    cap: float
    sinks: Operand | None

    @classmethod
    def of(cls, result: TracedTensor, anchor: Anchor, operands: Sequence[Operand]) -> Attention:
        q, k, v, *further = operands
        sinks = further.pop() if anchor.attrs["sinks"] else None
        mask = further[0] if further else None
        scale, causal, cap = (anchor.attrs[name] for name in ("scale", "causal", "cap"))
        return cls(result, q, k, v, mask, float(scale), bool(causal), float(cap), sinks)

    def check(self) -> None:
        """Refuses heads that are larger than 256, empty or too many, no position at all, or a tensor that is too large.

        Raises:
            OpRefusal: That is so.
        """
        super().check()
        sizes = self.size, self.value_size
        if min(*sizes, self.length) < 1 or max(sizes) > MAX_HEAD_SIZE:
            given = f"heads of {sizes[0]} and {sizes[1]} over {self.length} positions"
            raise OpRefusal(f"given {given}, expected heads of 1 to {MAX_HEAD_SIZE} and at least one position")
        if self.batch * self.groups > _MAX_HEADS:
            raise OpRefusal(f"given {self.batch} * {self.groups} heads of keys, expected at most {_MAX_HEADS}")

    def strides(self, *names: str) -> dict[str, int]:
        """Strides of operands along batch, heads, rows and a head, by the names of a kernel's parameters; zeros for one
        that is absent.

        Args:
            names: Of operands, in order: ``q``, ``k``, ``v`` or ``mask``.
        """
        found: dict[str, int] = {}
        for name in names:
            found |= named_strides(getattr(self, name), name, _DIMENSIONS)
        return found

    @property
    def dtypes(self) -> set[DType]:
        """Of the numbers of queries, keys and values."""
        return {operand.number_type for operand in (self.q, self.k, self.v)}

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def has_sinks(self) -> bool:
        return self.sinks is not None

    @property
    def mask_period(self) -> int:
        """How many elements of the batch have a mask of their own, which those behind them have again; 0 if all do."""
        own = self.batch if self.mask is None else self.mask.shape[0]
        return 0 if own == self.batch else own

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.k.shape[1]

    @property
    def shared(self) -> int:
        """Query heads that share a head of keys and values."""
        return self.q.shape[1] // self.groups

    @property
    def rows(self) -> int:
        """Rows of a query head."""
        return self.q.shape[2]

    @property
    def length(self) -> int:
        """Positions of keys and values."""
        return self.k.shape[2]

    @property
    def size(self) -> int:
        return self.q.shape[3]

    @property
    def value_size(self) -> int:
        return self.v.shape[3]

    @property
    def flops(self) -> int:
        """Arithmetic of both products, whatever a mask closes."""
        rows = self.batch * self.q.shape[1] * self.rows
        return 2 * rows * self.length * (self.size + self.value_size)
