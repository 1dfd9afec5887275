"""From the trace's anchors to problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from npu_compiler.lowering import problems
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.plugins import modules_of
from npu_compiler.tensor.trace import Anchor, TracedTensor

__all__ = ["problem_of", "takes_epilogue"]


@cache
def _kinds() -> Mapping[str, type[Problem]]:
    """The problems that the modules of this folder define, by what the trace calls them."""
    modules_of(problems.__name__)  # a class is known once its module is imported
    return {problem.kind: problem for problem in Problem.__subclasses__()}


def problem_of(result: TracedTensor, tensors: Sequence[TracedTensor]) -> Problem:
    """The problem whose result an anchor is.

    Args:
        result: A tensor whose source is an `Anchor`.
        tensors: The trace's tensors.
    """
    assert isinstance(result.source, Anchor)
    operands = [Operand(tensors[ref.tensor], ref) for ref in result.source.operands]
    return _kinds()[result.source.kind].of(result, result.source, operands)


def takes_epilogue(kind: str) -> bool:
    """Whether what follows an anchor of a kind may be computed with its results."""
    return _kinds()[kind].takes_epilogue
