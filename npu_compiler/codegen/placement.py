"""Gives every tensor that a launch binds its place: a buffer of the caller's, a weight, or a range of the arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.plan import (
    Argument,
    Buffer,
    Call,
    CallChoice,
    CallOption,
    KernelCall,
    KernelSource,
    LibraryCall,
    Role,
    Step,
)
from npu_compiler.codegen.target import Choice, Emitted, Launch, Library, Lowering
from npu_compiler.memory import Lifetime, plan_arena
from npu_compiler.trace import TracedTensor

__all__ = ["Placement"]


class Placement:
    """Assigns every tensor that a launch binds to a buffer and an offset.

    Attributes:
        buffers: The plan's buffers.
        slots: Buffer and byte offset of each placed tensor, by its index.
    """

    def __init__(
        self,
        tensors: Sequence[TracedTensor],
        inputs: int,
        weights: Mapping[int, str],
        outputs: Mapping[int, str],
        aliases: Mapping[int, int],
    ) -> None:
        self._tensors, self._inputs, self._weights = tensors, inputs, weights
        self._outputs, self._aliases = outputs, aliases
        self.buffers: list[Buffer] = []
        self.slots: dict[int, tuple[int, int]] = {}

    def place(self, emitted: Sequence[Emitted], lowering: Lowering) -> None:
        """Declares the buffers in use, and shares the arena among all that is neither the caller's nor a weight."""
        ranges = self._ranges(emitted)
        aliased_outputs = {self._aliases[i]: name for i, name in self._outputs.items() if i in self._aliases}
        outputs = {**self._outputs, **{i: name for i, name in aliased_outputs.items() if i >= self._inputs}}
        arena = []
        for index in sorted(ranges):
            if index < 0:
                arena.append(Lifetime(index, lowering.scratch_sizes[index], *ranges[index]))
                continue
            tensor = self._tensors[index]
            nbytes = tensor.layout.size * tensor.dtype.size
            if index in outputs:
                self._declare(index, Role.OUTPUT, outputs[index], nbytes)
            elif index in self._weights:
                self._declare(index, Role.WEIGHT, self._weights[index], nbytes)
            elif index < self._inputs:
                self._declare(index, Role.INPUT, tensor.name, nbytes)
            else:
                arena.append(Lifetime(index, nbytes, *ranges[index]))
        for index, name in outputs.items():
            if index not in ranges and index not in self._aliases:  # empty, so that no launch writes it
                self._declare(index, Role.OUTPUT, name, 0)
        offsets, size = plan_arena(arena)
        if arena:
            self.slots.update({key: (len(self.buffers), offset) for key, offset in offsets.items()})
            self.buffers.append(Buffer(Role.ARENA, "", size))

    def _ranges(self, emitted: Sequence[Emitted]) -> dict[int, tuple[int, int]]:
        """First and last moment of each tensor and scratch buffer in use, by its index.

        The options of a choice count as if they ran one after another, between the same tensors: scratch of one may lie
        where another's does.
        """
        ranges: dict[int, tuple[int, int]] = {}
        moment = 0
        for item in emitted:
            options = [option.launches for option in item.options] if isinstance(item, Choice) else [(item,)]
            first, last = moment, moment + len(options) - 1
            for now, launches in enumerate(options, first):
                for arg in (arg for launch in launches for arg in launch.args):
                    index = self._aliases.get(arg.tensor, arg.tensor)
                    start, end = (first, last) if index >= 0 else (now, now)
                    ranges[index] = (ranges.get(index, (start, end))[0], end)
            moment = last + 1
        return ranges

    def _declare(self, index: int, role: Role, name: str, nbytes: int) -> None:
        self.slots[index] = (len(self.buffers), 0)
        self.buffers.append(Buffer(role, name, nbytes))

    def steps(self, emitted: Sequence[Emitted]) -> tuple[tuple[Step, ...], tuple[KernelSource, ...]]:
        """What was emitted, with tensors as buffers and offsets, and the distinct kernels."""
        kernels: dict[KernelSource, int] = {}
        steps = tuple(self._step(item, kernels) for item in emitted)
        return steps, tuple(kernels)

    def _step(self, item: Emitted, kernels: dict[KernelSource, int]) -> Step:
        if not isinstance(item, Choice):
            return self._call(item, kernels)
        return CallChoice(
            tuple(
                CallOption(option.requires, tuple(self._call(launch, kernels) for launch in option.launches))
                for option in item.options
            )
        )

    def _call(self, launch: Launch | Library, kernels: dict[KernelSource, int]) -> Call:
        args = tuple(self._argument(arg) for arg in launch.args)
        if isinstance(launch, Library):
            return LibraryCall(launch.label, launch.routine, args, dict(launch.attrs), launch.flops, launch.nbytes)
        return KernelCall(
            launch.label,
            kernels.setdefault(launch.kernel, len(kernels)),
            args,
            launch.params,
            launch.grid,
            launch.block,
            launch.flops,
            launch.nbytes,
            launch.shared_bytes,
            launch.cluster,
        )

    def _argument(self, arg: TensorArg) -> Argument:
        buffer, base = self.slots[self._aliases.get(arg.tensor, arg.tensor)]
        return Argument(buffer, base + arg.offset, arg.writes, arg.map)
