"""Launches that begin while those ahead still run, from compute capability 9.0 on: what they read before they wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from npu_compiler.artifact.plan import Argument, Call, KernelCall, KernelSource, options_of
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Launch
from npu_compiler.tensor.expr import Expr, leaves

__all__ = ["EarlyLaunch", "are_settled", "is_free", "is_settled", "is_streaming", "kernel_number"]


@dataclass(frozen=True)
class EarlyLaunch(Launch):
    """A launch that lets the next one begin early.

    Attributes:
        hurries: Whether it does so before it has waited itself.
        streams: Whether what it reads ahead of its wait takes longer to arrive than to be computed with.
    """

    hurries: bool = False
    streams: bool = False


@dataclass
class _Told:
    """Kernels of a function: that let the next launch begin while they still wait for those ahead, and that stream."""

    hurrying: set[int] = field(default_factory=set)
    streaming: set[int] = field(default_factory=set)


def kernel_number(source: KernelSource, lowering: Lowering, hurries: bool = False, streams: bool = False) -> int:
    """As `Lowering.kernel`, of a launch that `hurries` or `streams`, as `EarlyLaunch` has it."""
    number = lowering.kernel(source)
    told = lowering.record(_Told)
    if hurries:
        told.hurrying.add(number)
    if streams:
        told.streaming.add(number)
    return number


def is_streaming(call: KernelCall, lowering: Lowering) -> bool:
    """Whether what a launch reads ahead of its wait takes longer to arrive than to be computed with."""
    return call.kernel in lowering.record(_Told).streaming


def is_settled(buffer: int, lowering: Lowering) -> bool:
    """Whether a scratch buffer is written when the next launch begins, however early: one since then waited."""
    return _has_waited(lowering, lambda argument: argument.buffer == buffer and argument.writes)


def is_free(buffer: int, lowering: Lowering) -> bool:
    """Whether no launch that binds a scratch buffer still runs when the next launch begins, however early.

    It is about buffers that live on: of others, what has their memory before may still be in use.
    """
    return _has_waited(lowering, lambda argument: argument.buffer == buffer)


def are_settled(exprs: Iterable[Expr], lowering: Lowering) -> bool:
    """Whether all that some expressions read is written when the next launch begins, however early."""
    read = {load.ref.tensor for expr in exprs for load in leaves(expr)}
    return all(lowering.tensors[index].source is None or lowering.ask(is_settled, index) for index in read)


def _has_waited(lowering: Lowering, uses: Callable[[Argument], bool]) -> bool:
    """Whether a launch behind the latest one of which an argument `uses` something lets no next one begin too early."""
    hurrying = lowering.record(_Told).hurrying
    for step in reversed(lowering.steps):
        if any(map(uses, step.args)):
            return False
        if all(any(_waits(call, hurrying) for call in option.calls) for option in options_of(step)):
            return True
    return False


def _waits(call: Call, hurrying: set[int]) -> bool:
    """Whether it lets the next launch begin only when all launches ahead of itself have finished."""
    return not (isinstance(call, KernelCall) and call.kernel in hurrying)
