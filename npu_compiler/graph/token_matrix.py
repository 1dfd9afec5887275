"""Tokens as a matrix: many threadgroups share a search through all of them, and what is known of a row spares it."""

from __future__ import annotations

from math import isqrt

from npu_compiler.graph.ir_builder import IRBuilder, IRTensor
from npu_compiler.integers import ceil_div

__all__ = ["as_matrix", "padded_logits", "relative_weights"]


def as_matrix(vocabulary: int) -> tuple[int, int]:
    """Rows and columns in which the tokens are looked at in their order; places behind the last one are empty."""
    columns = isqrt(vocabulary - 1) + 1
    return ceil_div(vocabulary, columns), columns


def padded_logits(graph: IRBuilder, logits: IRTensor, count: int) -> IRTensor:
    """`count` logits, those behind the last as of impossible tokens."""
    behind = count - logits["shape"][0]
    if not behind:
        return logits
    return graph.add("constant_pad_nd.default", logits["dtype"], (count,), logits, pad=[0, behind], value=float("-inf"))


def relative_weights(graph: IRBuilder, logits: IRTensor, best: IRTensor, inverse: IRTensor) -> IRTensor:
    """How probable tokens are at the temperature 1 / `inverse`, relative to the best: float32."""
    wide, highest = (graph.add("type_as.default", "float32", each["shape"], each, inverse) for each in (logits, best))
    below = graph.same("sub.Tensor", wide, highest)
    return graph.same("exp.default", graph.same("mul.Tensor", below, inverse))
