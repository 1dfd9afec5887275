"""Recorded commands: a list of them that runs once, and one that runs again and again on other buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence

from npu_compiler.errors import DeviceError
from software_gpu.native_runtime import CommandRecord, DispatchRecord
from software_gpu.pipeline import Binding, MTLComputePipelineState
from software_gpu.resources import MTLBuffer

__all__ = ["CommandList", "RecordedCommand", "Recording", "Runner"]

_RECORD_WORDS = ctypes.sizeof(CommandRecord) // 8
_BUFFERS_WORD = (CommandRecord.dispatch.offset + DispatchRecord.buffers.offset) // 8


class RecordedCommand:
    """A command, the buffers it needs alive, and the names to report when it fails."""

    def __init__(self, record: CommandRecord, buffers: tuple[MTLBuffer, ...]) -> None:
        self.record = record
        self.buffers = buffers
        self.pipeline: MTLComputePipelineState | None = None
        self.bindings: dict[int, Binding] = {}


class CommandList:
    """Commands that run together, in order.

    Attributes:
        records: What the device reads of them.
    """

    def __init__(self, commands: Sequence[RecordedCommand]) -> None:
        self._commands = commands
        self.records = (CommandRecord * len(commands))(*(command.record for command in commands))

    def command(self, number: int) -> RecordedCommand:
        """One of them, with all that it is bound to."""
        return self._commands[number]

    def buffers(self) -> Collection[MTLBuffer]:
        """Those that they touch."""
        return {buffer for command in self._commands for buffer in command.buffers}


Runner = Callable[[CommandList], None]


class Recording(CommandList):
    """Dispatches that run again and again, each time on the buffers that are given; one run at a time.

    Metal itself has none: there, commands are encoded anew for each run.
    """

    def __init__(
        self,
        runner: Runner,
        commands: Sequence[RecordedCommand],
        places: Sequence[Sequence[tuple[int, int]]],
        buffers: Sequence[MTLBuffer],
    ) -> None:
        """Takes over dispatches whose arguments were checked.

        Args:
            runner: What runs them.
            commands: The dispatches.
            places: Of each dispatch, the arguments that change: their index, and the number of the buffer they take.
            buffers: Those that the dispatches were recorded with.
        """
        super().__init__(commands)
        self._runner = runner
        self._words = memoryview(self.records).cast("B").cast("Q")
        self._spans = [buffer.span for buffer in buffers]
        self._lengths = [buffer.length() for buffer in buffers]
        self._given: Sequence[MTLBuffer] = ()  # within a run
        self._uses: list[list[tuple[int, int, int]]] = [[] for _ in buffers]  # dispatch, index, offset
        for number, (command, changing) in enumerate(zip(commands, places, strict=True)):
            for index, buffer in changing:
                _, offset = command.bindings.pop(index)  # else the buffer would live as long as the recording
                self._uses[buffer].append((number, index, offset))
            command.buffers = tuple(buffer for buffer, _ in command.bindings.values())

    def takes(self, buffers: Sequence[MTLBuffer]) -> bool:
        """Whether the buffers are as long as those that the arguments were checked with."""
        spans = [buffer.span for buffer in buffers]
        return spans == self._spans or [length for _, length in spans] == self._lengths

    def run(self, buffers: Sequence[MTLBuffer]) -> None:
        """Runs the dispatches and waits for them.

        Args:
            buffers: As many as it was recorded with, and as long.

        Raises:
            DeviceError: A kernel failed, or a buffer has another length.
        """
        spans = [buffer.span for buffer in buffers]
        if spans != self._spans:
            if not self.takes(buffers):
                raise DeviceError("a recording was given buffers of other lengths than it was made with. Record anew")
            self._move(spans)
        self._given = buffers
        try:
            self._runner(self)
        finally:
            self._given = ()

    def _move(self, spans: list[tuple[int, int]]) -> None:
        for uses, (address, _), (before, _) in zip(self._uses, spans, self._spans, strict=True):
            if address != before:
                for number, index, offset in uses:
                    self._words[number * _RECORD_WORDS + _BUFFERS_WORD + index] = address + offset
        self._spans = spans

    def command(self, number: int) -> RecordedCommand:
        known = self._commands[number]
        command = RecordedCommand(self.records[number], known.buffers)
        command.pipeline, command.bindings = known.pipeline, dict(known.bindings)
        for buffer, uses in zip(self._given, self._uses, strict=True):
            command.bindings |= {index: (buffer, offset) for user, index, offset in uses if user == number}
        return command

    def buffers(self) -> Collection[MTLBuffer]:
        return {*super().buffers(), *self._given}
