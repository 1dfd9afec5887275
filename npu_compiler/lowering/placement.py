"""Gives every tensor that a call binds its place: a buffer of the caller's, a weight, or a range of the arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from npu_compiler.artifact.memory import Lifetime, plan_arena
from npu_compiler.artifact.plan import FAULTS, Argument, Buffer, Call, Role, Step, change_calls, options_of
from npu_compiler.records import changed
from npu_compiler.tensor.index_check import FAULT_BYTES
from npu_compiler.tensor.trace import TracedTensor

__all__ = ["Placement"]


class Placement:
    """Assigns every tensor that a call binds to a buffer and an offset.

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
        self._places: Mapping[int, tuple[int, int]] = {}  # of aliases too

    def place(self, steps: Sequence[Step], scratch_sizes: Mapping[int, int]) -> tuple[Step, ...]:
        """Declares the buffers that steps bind; all that are no input, output or weight get places in the arena.

        Args:
            steps: What was emitted, whose arguments name tensors and scratch buffers.
            scratch_sizes: Bytes of each scratch buffer, by its index.

        Returns:
            The steps, whose arguments name the plan's buffers.
        """
        self._allocate(self._ranges(steps), scratch_sizes)
        aliased = {index: self.slots[base] for index, base in self._aliases.items() if base in self.slots}
        self._places = {**self.slots, **aliased}
        return tuple(change_calls(step, self._placed) for step in steps)

    def _allocate(self, ranges: Mapping[int, tuple[int, int]], scratch_sizes: Mapping[int, int]) -> None:
        aliased_outputs = {self._aliases[i]: name for i, name in self._outputs.items() if i in self._aliases}
        outputs = {**self._outputs, **{i: name for i, name in aliased_outputs.items() if i >= self._inputs}}
        arena = []
        for index in sorted(ranges.keys() - {FAULTS}):
            if index < 0:
                arena.append(Lifetime(index, scratch_sizes[index], *ranges[index]))
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
            if index not in ranges and index not in self._aliases:  # empty, so that no call writes it
                self._declare(index, Role.OUTPUT, name, 0)
        offsets, size = plan_arena(arena)
        if arena:
            self.slots.update({key: (len(self.buffers), offset) for key, offset in offsets.items()})
            self.buffers.append(Buffer(Role.ARENA, "", size))
        if FAULTS in ranges:
            self._declare(FAULTS, Role.FAULTS, "", FAULT_BYTES)

    def _ranges(self, steps: Sequence[Step]) -> dict[int, tuple[int, int]]:
        """First and last moment of each tensor and scratch buffer in use, by its index.

        The options of a choice count as if they ran one after another, between the same tensors: scratch of one may lie
        where another's does.
        """
        ranges: dict[int, tuple[int, int]] = {}
        moment = 0
        for step in steps:
            options = options_of(step)
            first, last = moment, moment + len(options) - 1
            for now, option in enumerate(options, first):
                for argument in (argument for call in option.calls for argument in call.args):
                    index = self._aliases.get(argument.buffer, argument.buffer)
                    start, end = (first, last) if index >= 0 else (now, now)
                    ranges[index] = (ranges.get(index, (start, end))[0], end)
            moment = last + 1
        return ranges

    def _declare(self, index: int, role: Role, name: str, nbytes: int) -> None:
        self.slots[index] = (len(self.buffers), 0)
        self.buffers.append(Buffer(role, name, nbytes))

    def _placed(self, call: Call) -> Call:
        places = [(argument, *self._places[argument.buffer]) for argument in call.args]
        return changed(call, args=tuple([Argument(b, base + a.offset, a.writes, a.extension) for a, b, base in places]))
