"""Draws of tokens by probability, as every target's lowering sees them before it divides the work."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem

__all__ = ["Draw"]

_PASSES = 4  # over a row: its highest logit, sums, and the tokens near what is looked for
_WEIGHT_FLOPS = 8  # of a weight


@dataclass(frozen=True)
class Draw(Problem):
    """A token of each row, drawn by probability: int64 [R]; `npu_compiler.ops.drawing.draw` says which.

    Attributes:
        logits: [R, V].
        limits: float32 [R, 3].
        top_k: int64 [R].
        words: int64 [R, 2].
    """

    kind = "draw"
    operand_names = ("logits", "limits", "top_k", "words")
    dims = (), (), (0,)

    logits: Operand
    limits: Operand
    top_k: Operand
    words: Operand

    @property
    def rows(self) -> int:
        return self.logits.shape[0]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes, and where rows lie, by the names of kernels' parameters."""
        return {
            "length": self.logits.shape[1],
            **self.logits.named_strides("logits", ("row", "column")),
            **self.limits.named_strides("limits", ("row", "column")),
            "top_k_row": self.top_k.strides[0],
            **self.words.named_strides("words", ("row", "column")),
        }

    @property
    def flops(self) -> int:
        return _PASSES * _WEIGHT_FLOPS * prod(self.logits.shape)
