"""The end from which launches over images take their tiles.

What a launch has read or written last is still in the level-2 cache. One that goes on with the same tensor begins at
the other end: there it finds it, before what it brings itself takes the room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from math import prod

from cuda_compiler.anchors import AnchoredGroup, anchor_launch
from npu_compiler.artifact.plan import KernelCall, Step, options_of
from npu_compiler.lowering.anchors import Epilogue
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Launch

__all__ = ["BACKWARDS", "DirectedGroup"]

BACKWARDS = "backwards"
"""The first parameter of kernels that take tiles from either end: 1 for the last one first."""

_INT_BYTES = 4
_REMEMBERED = 8  # steps, behind which the cache holds other tensors


@dataclass
class _Directed:
    """The kernels of a function that take tiles from either end."""

    kernels: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class DirectedGroup(AnchoredGroup):
    """A group around a problem of images: all ways to compute it begin at the same end."""

    @cached_property
    def backwards(self) -> int:
        """From which end tiles are taken: the other one than by the launch that used its largest tensor last."""
        tensors = [self.lowering.tensors[index] for index in self.group.reads()]
        largest = max(tensors, key=lambda tensor: prod(tensor.shape) * tensor.dtype.size)
        other_end: int = self.lowering.ask(_other_end, largest.index)
        return other_end

    def directed(self, launch: Launch, size: int) -> KernelCall:
        """As `launch`, for a template whose first parameter is `BACKWARDS`."""
        return self.directed_with(launch, self.epilogue(size))

    def directed_with(self, launch: Launch, fused: Epilogue) -> KernelCall:
        """The same with an epilogue of the kernel's own."""
        call = anchor_launch(launch, fused, self.lowering)
        self.lowering.record(_Directed).kernels.add(call.kernel)
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
