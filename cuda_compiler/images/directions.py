"""The end from which launches over images take their tiles.

What a launch has read or written last is still in the level-2 cache. One that goes on with the same tensor begins at
the other end: there it finds it, before what it brings itself takes the room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import prod

from cuda_compiler.anchors import anchor_epilogue, anchor_launch
from cuda_compiler.packing import PACK_SIZES, pack_size
from npu_compiler.artifact.plan import KernelCall, Step, options_of
from npu_compiler.lowering.anchors import Epilogue
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.positions import Positions, epilogue_positions
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Launch

__all__ = ["BACKWARDS", "DirectedGroup", "directed_launch"]

BACKWARDS = "backwards"
"""The first parameter of kernels that take tiles from either end: 1 for the last one first."""

_INT_BYTES = 4
_REMEMBERED = 8  # steps, behind which the cache holds other tensors


@dataclass
class _Directed:
    """The kernels of a function that take tiles from either end."""

    kernels: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class DirectedGroup:
    """A group around a problem of images while it is lowered: all ways to compute it begin at the same end.

    Attributes:
        group: What is computed.
        found: The operands of its epilogue.
        lowering: Where launches are collected.
    """

    group: Group
    found: Positions
    lowering: Lowering

    @classmethod
    def of(cls, group: Group, lowering: Lowering) -> DirectedGroup:
        """A group with the operands of its epilogue.

        Raises:
            OpRefusal: A tensor that the epilogue reads is too large.
        """
        return cls(group, epilogue_positions(group, lowering, "sum"), lowering)

    @property
    def device(self) -> DeviceModel:
        """What choices are made for."""
        return self.lowering.device

    @cached_property
    def backwards(self) -> int:
        """From which end tiles are taken: the other one than by the launch that used its largest tensor last."""
        tensors = [self.lowering.tensors[index] for index in self.group.reads()]
        largest = max(tensors, key=lambda tensor: prod(tensor.shape) * tensor.dtype.size)
        other_end: int = self.lowering.ask(_other_end, largest.index)
        return other_end

    def pack_size(self, channels: int, most: int = PACK_SIZES[0]) -> int:
        """How many neighbouring channels of the result the epilogue reads and stores together, of `most`."""
        return pack_size(self.group, self.found.operands, channels, most=most)

    def epilogue(self, size: int) -> Epilogue:
        """The epilogue of kernels whose threads store so many neighbouring channels."""
        return anchor_epilogue(self.group, self.found, size)


def directed_launch(launch: Launch, fused: Epilogue, lowering: Lowering) -> KernelCall:
    """As `anchor_launch`, for a template whose first parameter is `BACKWARDS`."""
    call = anchor_launch(launch, fused, lowering)
    lowering.record(_Directed).kernels.add(call.kernel)
    return call


def _other_end(buffer: int, lowering: Lowering) -> int:
    """1 where the latest step that uses a tensor takes its tiles from the first on, 0 where none has lately."""
    for step in islice(reversed(lowering.emitted), _REMEMBERED):
        if any(argument.buffer == buffer for argument in step.args):
            return 1 - _end(step, lowering.record(_Directed).kernels)
    return 0


def _end(step: Step, directed: set[int]) -> int:
    """From which end the last launch of a step takes its tiles."""
    call = options_of(step)[0].calls[-1]
    if not isinstance(call, KernelCall) or call.kernel not in directed:
        return 0
    return int.from_bytes(call.params[:_INT_BYTES], "little")
