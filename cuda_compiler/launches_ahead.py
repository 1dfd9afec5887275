"""What a launch that begins early finds on the multiprocessors: blocks of the launches ahead, and room beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cuda_compiler.artifact.extensions import is_beside
from cuda_compiler.early_launches import is_streaming
from npu_compiler.artifact.plan import KernelCall, options_of
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.target import Lowering

__all__ = ["Ahead", "alone_bytes", "launches_ahead", "leave_room", "paced_blocks", "spread_bytes"]

_LATEST = 5  # launches that are looked at: a layer of a decoder
_RUNNING = 2  # of these, that mostly still run, or wait, when one begins early
_KEPT_BYTES = 2048  # of shared memory that the driver keeps, and kernels declare, for each block at the most


@dataclass(frozen=True)
class Ahead:
    """A launch ahead of one that begins early.

    Attributes:
        blocks: All of its blocks.
        shared_bytes: A block's dynamic shared memory.
        beside: Whether it leaves room beside its blocks.
        streams: Whether what it reads ahead of its wait takes longer to arrive than to be computed with.
    """

    blocks: int
    shared_bytes: int
    beside: bool
    streams: bool = False

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
    return tuple(
        Ahead(prod(call.grid), call.shared_bytes, is_beside(call), is_streaming(call, lowering)) for call in kernels
    )


def leave_room(ahead: Sequence[Ahead]) -> bool:
    """Whether some of these launches leave room beside their blocks, as those behind them then do."""
    return any(each.beside for each in ahead)


def paced_blocks(ahead: Sequence[Ahead], blocks: int, shared_bytes: int, device: DeviceModel) -> int:
    """How many blocks begin long before the launches ahead have ended: not those that must wait for room beside them.

    Args:
        ahead: The launches.
        blocks: All, which have a multiprocessor each.
        shared_bytes: Of a block.
        device: The device.
    """
    room = device.core_shared_bytes - shared_bytes - _KEPT_BYTES
    taken = sum(each.blocks for each in ahead[-_RUNNING:] if each.needs > room)
    return min(blocks, max(0, device.cores - taken))


def alone_bytes(blocks: int, shared_bytes: int, device: DeviceModel) -> int:
    """Shared memory for a block so that no two of a launch are on one multiprocessor, where each can have its own.

    Args:
        blocks: All.
        shared_bytes: What a block needs.
        device: The device.
    """
    return max(shared_bytes, device.core_shared_bytes // 2) if blocks <= device.cores else shared_bytes


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
