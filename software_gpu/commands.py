"""Command queues, command buffers and encoders: commands are recorded, checked, and run in order at commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from npu_compiler.errors import DeviceError
from npu_compiler.integers import ceil_div
from software_gpu.native_runtime import CommandKind, CommandRecord, DispatchRecord
from software_gpu.pipeline import Binding, MTLComputePipelineState, check_buffer_index
from software_gpu.recording import CommandList, RecordedCommand, Recording, Runner
from software_gpu.resources import BytesLike, MTLBuffer, MTLSize, NSRange, allocate, as_bytes

__all__ = ["MTLCommandBuffer", "MTLCommandQueue", "record"]

MAX_INLINE_BYTES = 4096
_INLINE_ALIGNMENT = 256
_ARENA_BYTES = 65536
_STATUS_NOT_ENQUEUED, _STATUS_COMPLETED, _STATUS_ERROR = 0, 4, 5


_Encoder = TypeVar("_Encoder", bound="_CommandEncoder")


class _CommandEncoder:
    """What compute and blit encoders share: being open, and labels that only a debugger would show."""

    def __init__(self, commands: list[RecordedCommand], on_end: Callable[[], None]) -> None:
        self._commands = commands
        self._on_end = on_end
        self._open = True
        self._label: str | None = None

    def _check_open(self, call: str) -> None:
        if not self._open:
            raise DeviceError(f"{call} was called after endEncoding. Take a new encoder from the command buffer")

    def endEncoding(self) -> None:
        self._check_open("endEncoding")
        self._open = False
        self._on_end()

    def label(self) -> str | None:
        return self._label

    def setLabel_(self, label: str) -> None:
        self._label = label

    def pushDebugGroup_(self, name: str) -> None:
        self._check_open("pushDebugGroup")

    def popDebugGroup(self) -> None:
        self._check_open("popDebugGroup")


class MTLComputeCommandEncoder(_CommandEncoder):
    """Records dispatches. Bindings stay from one dispatch to the next, as in Metal."""

    def __init__(self, commands: list[RecordedCommand], on_end: Callable[[], None]) -> None:
        super().__init__(commands, on_end)
        self._pipeline: MTLComputePipelineState | None = None
        self._bindings: dict[int, Binding] = {}
        self._threadgroup_lengths: dict[int, int] = {}
        self._arena: MTLBuffer | None = None
        self._arena_used = 0

    def setComputePipelineState_(self, state: MTLComputePipelineState) -> None:
        self._check_open("setComputePipelineState")
        self._pipeline = state

    def setBuffer_offset_atIndex_(self, buffer: MTLBuffer | None, offset: int, index: int) -> None:
        self._check_open("setBuffer")
        check_buffer_index(index)
        if buffer is None:
            self._bindings.pop(index, None)
            return
        if not 0 <= offset < buffer.length():
            raise DeviceError(
                f"{self._context()}buffer({index}): offset {offset} is not inside a buffer of {buffer.length()} bytes"
            )
        self._bindings[index] = (buffer, offset)

    def setBufferOffset_atIndex_(self, offset: int, index: int) -> None:
        bound = self._bindings.get(index)
        if bound is None:
            raise DeviceError(f"{self._context()}buffer({index}) has no buffer whose offset could be set")
        self.setBuffer_offset_atIndex_(bound[0], offset, index)

    def setBytes_length_atIndex_(self, data: BytesLike, length: int, index: int) -> None:
        self._check_open("setBytes")
        check_buffer_index(index)
        if length > MAX_INLINE_BYTES:
            raise DeviceError(
                f"{self._context()}setBytes at index {index}: {length} bytes; the most is {MAX_INLINE_BYTES}. "
                "Put them in a buffer"
            )
        given = as_bytes(data, length, f"{self._context()}setBytes at index {index}")
        # The binding ends where the bytes end, so that a struct argument larger than them is noticed.
        self._bindings[index] = self._place(given.tobytes())

    def _place(self, data: bytes) -> Binding:
        if self._arena is None or self._arena_used + len(data) > _ARENA_BYTES:
            self._arena, self._arena_used = allocate(_ARENA_BYTES), 0
        start = self._arena_used
        self._arena_used = ceil_div(start + len(data) + 1, _INLINE_ALIGNMENT) * _INLINE_ALIGNMENT
        self._arena.contents().as_buffer(_ARENA_BYTES)[start : start + len(data)] = data
        return self._arena.part(start, len(data)), 0

    def setThreadgroupMemoryLength_atIndex_(self, length: int, index: int) -> None:
        self._check_open("setThreadgroupMemoryLength")
        check_buffer_index(index)
        if length <= 0 or length % 16:
            raise DeviceError(
                f"{self._context()}threadgroup({index}): a length of {length} bytes; Metal takes multiples of 16"
            )
        self._threadgroup_lengths[index] = length

    def dispatchThreadgroups_threadsPerThreadgroup_(
        self, groups: tuple[int, int, int], threads: tuple[int, int, int]
    ) -> None:
        pipeline = self._ready("dispatchThreadgroups")
        groups, threads = MTLSize(*groups), MTLSize(*threads)
        pipeline.check_threads(threads, groups, "threadgroups")
        grid = MTLSize(*(count * size for count, size in zip(groups, threads, strict=True)))
        self._dispatch(pipeline, groups, threads, grid)

    def dispatchThreads_threadsPerThreadgroup_(self, grid: tuple[int, int, int], threads: tuple[int, int, int]) -> None:
        pipeline = self._ready("dispatchThreads")
        grid, threads = MTLSize(*grid), MTLSize(*threads)
        pipeline.check_threads(threads, grid, "threads in groups")
        groups = MTLSize(*(ceil_div(size, step) for size, step in zip(grid, threads, strict=True)))
        self._dispatch(pipeline, groups, threads, grid)

    def memoryBarrierWithScope_(self, scope: int) -> None:
        self._check_open("memoryBarrierWithScope")

    def _ready(self, call: str) -> MTLComputePipelineState:
        self._check_open(call)
        if self._pipeline is None:
            raise DeviceError(f"{call} was called with no pipeline. Call setComputePipelineState_ first")
        return self._pipeline

    def _dispatch(self, pipeline: MTLComputePipelineState, groups: MTLSize, threads: MTLSize, grid: MTLSize) -> None:
        pipeline.check_bindings(self._bindings)
        offsets, threadgroup_bytes = pipeline.threadgroup_layout(self._threadgroup_lengths)
        record = CommandRecord(kind=CommandKind.DISPATCH)
        dispatch: DispatchRecord = record.dispatch
        dispatch.entry = pipeline.entry(threads, grid)
        for index, (buffer, offset) in self._bindings.items():
            dispatch.buffers[index] = buffer.address + offset
            dispatch.buffer_bytes[index] = buffer.length() - offset
        for index, offset in offsets.items():
            dispatch.threadgroup_offsets[index] = offset
        dispatch.threadgroup_bytes = threadgroup_bytes
        dispatch.groups[:], dispatch.threads[:], dispatch.grid[:] = groups, threads, grid
        bindings = dict(self._bindings)
        command = RecordedCommand(record, tuple(buffer for buffer, _ in bindings.values()))
        command.pipeline, command.bindings = pipeline, bindings
        self._commands.append(command)

    def _context(self) -> str:
        return f"kernel '{self._pipeline.kernel.name}': " if self._pipeline else ""


class MTLBlitCommandEncoder(_CommandEncoder):
    """Records copies and fills."""

    def copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size_(
        self, source: MTLBuffer, source_offset: int, target: MTLBuffer, target_offset: int, size: int
    ) -> None:
        self._check_open("copyFromBuffer")
        _check_range("copyFromBuffer, source", source, source_offset, size)
        _check_range("copyFromBuffer, destination", target, target_offset, size)
        record = CommandRecord(
            kind=CommandKind.COPY,
            target=target.address + target_offset,
            source=source.address + source_offset,
            bytes=size,
        )
        self._commands.append(RecordedCommand(record, (source, target)))

    def fillBuffer_range_value_(self, buffer: MTLBuffer, byte_range: tuple[int, int], value: int) -> None:
        self._check_open("fillBuffer")
        start, length = NSRange(*byte_range)
        _check_range("fillBuffer", buffer, start, length)
        if not 0 <= value <= 255:
            raise DeviceError(f"fillBuffer: the value {value} is not a byte; give 0 to 255")
        record = CommandRecord(kind=CommandKind.FILL, value=value, target=buffer.address + start, bytes=length)
        self._commands.append(RecordedCommand(record, (buffer,)))


def _check_range(what: str, buffer: MTLBuffer, offset: int, size: int) -> None:
    if offset < 0 or size <= 0 or offset + size > buffer.length():
        raise DeviceError(f"{what}: {size} bytes at offset {offset} are not inside a buffer of {buffer.length()} bytes")


class MTLCommandBuffer:
    """Commands that run together, in order, at commit."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._commands: list[RecordedCommand] = []
        self._encoding = False
        self._status = _STATUS_NOT_ENQUEUED
        self._error: DeviceError | None = None
        self._times = (0.0, 0.0)
        self._label: str | None = None

    def computeCommandEncoder(self) -> MTLComputeCommandEncoder:
        return self._begin(MTLComputeCommandEncoder)

    def blitCommandEncoder(self) -> MTLBlitCommandEncoder:
        return self._begin(MTLBlitCommandEncoder)

    def _begin(self, encoder: type[_Encoder]) -> _Encoder:
        if self._encoding:
            raise DeviceError("the command buffer's previous encoder is still open. Call its endEncoding first")
        if self._status != _STATUS_NOT_ENQUEUED:
            raise DeviceError("the command buffer was committed. Take a new one from the queue")
        self._encoding = True
        return encoder(self._commands, self._end)

    def _end(self) -> None:
        self._encoding = False

    def _record(self, places: Sequence[Sequence[tuple[int, int]]], buffers: Sequence[MTLBuffer]) -> Recording:
        self._check_ready("record")
        self._status, commands, self._commands = _STATUS_COMPLETED, self._commands, []
        return Recording(self._runner, commands, places, buffers)

    def commit(self) -> None:
        """Runs the commands; returns when they are done.

        Raises:
            DeviceError: The buffer was committed before, an encoder is open, or a kernel failed.
        """
        self._check_ready("commit")
        begin = time.perf_counter()
        try:
            self._runner(CommandList(self._commands))
            self._status = _STATUS_COMPLETED
        except DeviceError as error:
            self._status, self._error = _STATUS_ERROR, error
            raise
        except BaseException as error:  # Ctrl-C
            self._status, self._error = _STATUS_ERROR, DeviceError(f"interrupted: {type(error).__name__}")
            raise
        finally:
            self._times = (begin, time.perf_counter())
            self._commands.clear()

    def _check_ready(self, call: str) -> None:
        if self._status != _STATUS_NOT_ENQUEUED:
            raise DeviceError("the command buffer was committed already. Take a new one from the queue")
        if self._encoding:
            raise DeviceError(f"{call} was called while an encoder is open. Call its endEncoding first")

    def waitUntilCompleted(self) -> None:
        if self._status == _STATUS_NOT_ENQUEUED:
            raise DeviceError("waitUntilCompleted was called before commit and would wait for ever")

    def status(self) -> int:
        return self._status

    def error(self) -> DeviceError | None:
        return self._error

    def GPUStartTime(self) -> float:
        return self._times[0]

    def GPUEndTime(self) -> float:
        return self._times[1]

    def label(self) -> str | None:
        return self._label

    def setLabel_(self, label: str) -> None:
        self._label = label


def record(
    command_buffer: MTLCommandBuffer, places: Sequence[Sequence[tuple[int, int]]], buffers: Sequence[MTLBuffer]
) -> Recording:
    """The commands of a buffer, to be run as often as wanted; the buffer is used up. Metal itself has no such thing.

    Args:
        command_buffer: One whose commands are dispatches all.
        places: Of each dispatch, the arguments that change from run to run: their index, and the number of the buffer
            they take.
        buffers: Those that were bound.

    Raises:
        DeviceError: It was committed before, or an encoder is open.
    """
    return command_buffer._record(places, buffers)


class MTLCommandQueue:
    """Where command buffers come from."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def commandBuffer(self) -> MTLCommandBuffer:
        return MTLCommandBuffer(self._runner)
