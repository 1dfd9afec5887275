"""Launches that begin while those ahead still run, from compute capability 9.0 on: what they read before they wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from cuda_compiler.artifact.extensions import is_beside
from npu_compiler.artifact.plan import Call, KernelCall, KernelSource, options_of
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Launch
from npu_compiler.tensor.expr import Expr, leaves

__all__ = ["Ahead", "EarlyLaunch", "are_settled", "is_settled", "kernel_number", "launches_ahead", "paced_blocks"]
__all__ += ["spread_bytes"]

_LATEST = 5  # launches that are looked at: a layer of a decoder
_RUNNING = 2  # of these, that mostly still run, or wait, when one begins early
_KEPT_BYTES = 2048  # of shared memory that the driver keeps, and kernels declare, for each block at the most


@dataclass(frozen=True)
class EarlyLaunch(Launch):
    """A launch that lets the next one begin early; before it has waited itself where it `hurries`."""

    hurries: bool = False


@dataclass
class _Hurrying:
    """The kernels of a function that let the next launch begin while they still wait for those ahead."""

    kernels: set[int] = field(default_factory=set)


def kernel_number(source: KernelSource, lowering: Lowering, hurries: bool = False) -> int:
    """As `Lowering.kernel`; `hurries` where the kernel lets the next launch begin before it has waited itself."""
    number = lowering.kernel(source)
    if hurries:
        lowering.record(_Hurrying).kernels.add(number)
    return number


def is_settled(buffer: int, lowering: Lowering) -> bool:
    """Whether a scratch buffer is written when the next launch begins, however early: one since then waited."""
    hurrying = lowering.record(_Hurrying).kernels
    for step in reversed(lowering.steps):
        if any(argument.buffer == buffer and argument.writes for argument in step.args):
            return False
        if all(any(_waits(call, hurrying) for call in option.calls) for option in options_of(step)):
            return True
    return False


def are_settled(exprs: Iterable[Expr], lowering: Lowering) -> bool:
    """Whether all that some expressions read is written when the next launch begins, however early."""
    read = {load.ref.tensor for expr in exprs for load in leaves(expr)}
    return all(lowering.tensors[index].source is None or lowering.ask(is_settled, index) for index in read)


@dataclass(frozen=True)
class Ahead:
    """A launch ahead of one that begins early: its blocks, a block's dynamic shared memory, whether it leaves room."""

    blocks: int
    shared_bytes: int
    beside: bool

    @property
    def needs(self) -> int:
        """Bytes of a multiprocessor's shared memory that a block takes."""
        return self.shared_bytes + _KEPT_BYTES


def launches_ahead(_: int, lowering: Lowering) -> tuple[Ahead, ...]:
    """The latest launches, the last one at the end, as devices that begin launches early do them.

    A question for `Lowering.ask`, where it makes no difference which tensor is named.
    """
    calls = [call for step in lowering.steps[-_LATEST:] for call in options_of(step)[0].calls]
    kernels = (call for call in calls[-_LATEST:] if isinstance(call, KernelCall))
    return tuple(Ahead(prod(call.grid), call.shared_bytes, is_beside(call)) for call in kernels)


def paced_blocks(ahead: Sequence[Ahead], shared_bytes: int, device: DeviceModel) -> int:
    """How many blocks begin long before the launches ahead have ended: not those that must wait for room beside them.

    Args:
        ahead: The launches.
        shared_bytes: Of a block.
        device: Where blocks have a multiprocessor each.
    """
    room = device.core_shared_bytes - shared_bytes - _KEPT_BYTES
    return max(0, device.cores - sum(each.blocks for each in ahead[-_RUNNING:] if each.needs > room))


def spread_bytes(ahead: Sequence[Ahead], shared_bytes: int, device: DeviceModel) -> int:
    """Shared memory for a block so that not many crowd on few multiprocessors.

    Where the launches ahead leave no room on most, small blocks would all go to those that have none of the last one.
    Now they wait until there is room, and so does the launch behind them. Where one of the layer before filled the
    device, what that would have asked for meanwhile is worth more.

    Args:
        ahead: The launches.
        shared_bytes: What a block needs.
        device: The device.
    """
    running = ahead[-_RUNNING:]
    needed = sum(each.needs for each in running) + shared_bytes + _KEPT_BYTES
    stay = len(running) == _RUNNING and all(each.beside for each in running)
    fills = any(
        not each.beside and each.blocks * 2 > device.cores and each.needs * 2 > device.core_shared_bytes
        for each in ahead
    )
    if not stay or fills or needed <= device.core_shared_bytes or running[-1].blocks >= device.cores:
        return shared_bytes
    beside_last = device.core_shared_bytes - running[-1].needs - _KEPT_BYTES
    return max(shared_bytes, min(device.core_shared_bytes // 3 - _KEPT_BYTES, beside_last))


def _waits(call: Call, hurrying: set[int]) -> bool:
    """Whether it lets the next launch begin only when all launches ahead of itself have finished."""
    return not (isinstance(call, KernelCall) and call.kernel in hurrying)
