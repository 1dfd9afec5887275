"""From the trace's anchors to problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.pooling import Pooling
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.lowering.problems.product import Product
from npu_compiler.tensor.trace import Anchor, TracedTensor

__all__ = ["problem_of"]

_KINDS: Mapping[str, Callable[[TracedTensor, Anchor, Sequence[Operand]], Problem]] = {
    "matmul": Product.of,
    "conv2d": Convolution.of,
    "pool2d": Pooling.of,
    "attention": Attention.of,
}


def problem_of(result: TracedTensor, tensors: Sequence[TracedTensor]) -> Problem:
    """The problem whose result an anchor is.

    Args:
        result: A tensor whose source is an `Anchor`.
        tensors: The trace's tensors.
    """
    assert isinstance(result.source, Anchor)
    operands = [Operand(tensors[ref.tensor], ref) for ref in result.source.operands]
    return _KINDS[result.source.kind](result, result.source, operands)
