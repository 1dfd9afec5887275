"""Metal's Python names (those of pyobjc-framework-Metal) for machines that have no Metal.

    from software_gpu import metal as Metal
    device = Metal.MTLCreateSystemDefaultDevice()

Only what a compute runtime uses is here. Sizes, indices and argument order are Metal's; what its validation layer
would refuse raises a DeviceError that names the kernel and the argument.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

from npu_compiler.errors import DeviceError, KernelCompileError
from software_gpu.commands import MTLCommandBuffer, MTLCommandQueue
from software_gpu.device_process import run_commands
from software_gpu.library import CompiledKernel, CompiledLibrary, Execution, compile_library
from software_gpu.native_runtime import MANY_THREADS, Failure, FailureKind
from software_gpu.pipeline import MAX_THREADGROUP_BYTES, MAX_THREADS, MTLComputePipelineState
from software_gpu.recording import CommandList, RecordedCommand, Runner
from software_gpu.resources import (
    BytesLike,
    MTLBuffer,
    MTLSize,
    MTLSizeMake,
    NSRange,
    allocate,
    any_of_callers,
    as_bytes,
    lent,
    wrap,
)

__all__ = [
    "MTLBarrierScopeBuffers",
    "MTLBuffer",
    "MTLCommandBuffer",
    "MTLCommandBufferStatusCompleted",
    "MTLCommandBufferStatusError",
    "MTLCommandBufferStatusNotEnqueued",
    "MTLCommandQueue",
    "MTLCompileOptions",
    "MTLComputePipelineState",
    "MTLCreateSystemDefaultDevice",
    "MTLDevice",
    "MTLFunction",
    "MTLGPUFamilyMetal3",
    "MTLLanguageVersion3_0",
    "MTLLanguageVersion3_1",
    "MTLLibrary",
    "MTLResourceStorageModePrivate",
    "MTLResourceStorageModeShared",
    "MTLSize",
    "MTLSizeMake",
    "NSRange",
    "create_device",
]

MTLResourceStorageModeShared = 0
MTLResourceStorageModePrivate = 32
MTLBarrierScopeBuffers = 1
MTLCommandBufferStatusNotEnqueued = 0
MTLCommandBufferStatusCompleted = 4
MTLCommandBufferStatusError = 5
MTLLanguageVersion3_0 = 3 << 16
MTLLanguageVersion3_1 = (3 << 16) + 1
MTLGPUFamilyMetal3 = 5001

_NEARBY_BYTES = 1 << 20  # an address farther than this from every argument is not blamed on one


class NSError:
    """The second value of a call that ends in `error_`."""

    def __init__(self, cause: Exception) -> None:
        self._description = str(cause)

    def localizedDescription(self) -> str:
        return self._description

    def __str__(self) -> str:
        return self._description


class MTLCompileOptions:
    """Macros for a library; the language version and fast math are accepted and change nothing."""

    def __init__(self) -> None:
        self._macros: dict[str, str] = {}

    @classmethod
    def alloc(cls) -> MTLCompileOptions:
        return cls()

    @classmethod
    def new(cls) -> MTLCompileOptions:
        return cls()

    def init(self) -> MTLCompileOptions:
        return self

    def preprocessorMacros(self) -> dict[str, str]:
        return dict(self._macros)

    def setPreprocessorMacros_(self, macros: Mapping[str, object]) -> None:
        self._macros = {name: str(value) for name, value in macros.items()}

    def setLanguageVersion_(self, version: int) -> None:
        if version > MTLLanguageVersion3_1:
            raise DeviceError(f"Metal language version {version >> 16}.{version & 0xFFFF}; the software GPU knows 3.1")

    def setFastMathEnabled_(self, enabled: bool) -> None:
        """The host's mathematics is the precise kind either way."""


class MTLFunction:
    """A kernel of a library."""

    def __init__(self, kernel: CompiledKernel) -> None:
        self.kernel = kernel

    def name(self) -> str:
        return self.kernel.name


class MTLLibrary:
    """The kernels of one source."""

    def __init__(self, compiled: CompiledLibrary) -> None:
        self._compiled = compiled

    def functionNames(self) -> list[str]:
        return list(self._compiled.kernels)

    def newFunctionWithName_(self, name: str) -> MTLFunction | None:
        kernel = self._compiled.kernels.get(name)
        return MTLFunction(kernel) if kernel else None


class MTLDevice:
    """A GPU made of the host's cores, in a process of its own."""

    def __init__(self, runner: Runner, execution: Execution) -> None:
        self._runner = runner
        self._execution = execution

    def name(self) -> str:
        return "Software GPU"

    def maxThreadsPerThreadgroup(self) -> MTLSize:
        return MTLSize(MAX_THREADS, MAX_THREADS, MAX_THREADS)

    def maxThreadgroupMemoryLength(self) -> int:
        return MAX_THREADGROUP_BYTES

    def maxBufferLength(self) -> int:
        return self.recommendedMaxWorkingSetSize()

    def recommendedMaxWorkingSetSize(self) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def hasUnifiedMemory(self) -> bool:
        return True

    def supportsFamily_(self, family: int) -> bool:
        return family == MTLGPUFamilyMetal3

    def newCommandQueue(self) -> MTLCommandQueue:
        return MTLCommandQueue(self._runner)

    def newBufferWithLength_options_(self, length: int, options: int) -> MTLBuffer:
        return allocate(length)

    def newBufferWithBytes_length_options_(self, data: BytesLike, length: int, options: int) -> MTLBuffer:
        given = as_bytes(data, length, "newBufferWithBytes")
        buffer = allocate(length)
        buffer.contents().as_buffer(length)[:] = given.data
        return buffer

    def newBufferWithBytesNoCopy_length_options_deallocator_(
        self, data: BytesLike, length: int, options: int, deallocator: object
    ) -> MTLBuffer:
        if deallocator is not None:
            raise DeviceError("newBufferWithBytesNoCopy: pass None as the deallocator; the caller keeps the memory")
        return wrap(data, length)

    def newLibraryWithSource_options_error_(
        self, source: str, options: MTLCompileOptions | None, error: None
    ) -> tuple[MTLLibrary | None, NSError | None]:
        macros = options.preprocessorMacros() if options else {}
        try:
            return MTLLibrary(compile_library(source, macros, execution=self._execution)), None
        except KernelCompileError as failure:
            return None, NSError(failure)

    def newComputePipelineStateWithFunction_error_(
        self, function: MTLFunction, error: None
    ) -> tuple[MTLComputePipelineState | None, NSError | None]:
        try:
            return MTLComputePipelineState(function.kernel), None
        except DeviceError as failure:
            return None, NSError(failure)


def _run(commands: CommandList, *, reversed_threads: bool, checked: bool) -> None:
    with lent(commands.buffers()) if any_of_callers() else nullcontext():
        failure = run_commands(commands.records, reversed_threads=reversed_threads, checked=checked)
    if failure is not None:
        raise DeviceError(_explain(failure, commands.command(failure.command)))


def _explain(failure: Failure, command: RecordedCommand) -> str:
    kernel = f"kernel '{command.pipeline.kernel.name}'" if command.pipeline else "a copy"
    if failure.kind in (FailureKind.NONE, FailureKind.STOPPED):
        return f"{kernel}: the software GPU's process stopped: {failure.reason}. The next command begins another one"
    if failure.kind is FailureKind.DIVERGENT_BARRIER:
        return (
            f"{kernel}, line {failure.line}: thread {failure.thread} waits at a barrier or simdgroup function while "
            f"thread {failure.other_thread} waits on line {failure.other_line}. Move it out of the branch that only "
            "some threads take"
        )
    if (
        failure.kind is FailureKind.RACE
    ):  # two threads met in memory that is theirs to touch: an argument's, or the group's
        place = _place_inside(failure.address, command) or "threadgroup memory"
        other = "several threads" if failure.other_thread == MANY_THREADS else f"thread {failure.other_thread}"
        return (
            f"{kernel}: thread {failure.thread} and {other} touch {place}, at least one writes, and no barrier "
            "orders them. Put a threadgroup_barrier with that memory's flag between the accesses"
        )
    if failure.kind is FailureKind.OUT_OF_ARRAY:
        line = f", line {failure.line}" if failure.line else ""
        beyond = f"element {ctypes.c_int(failure.address).value}" if failure.line else "an element"
        return (
            f"{kernel}{line}: thread {failure.thread} takes {beyond} of an array that ends before it. "
            "Compare its index with the array's length"
        )
    verb = "writes" if failure.other_thread else "reads"
    place = _nearest_place(failure.address, command)
    return f"{kernel}: thread {failure.thread} {verb} out of bounds, {place}. Compare its index with the size bound"


def _arguments(command: RecordedCommand) -> Iterator[tuple[str, int, int]]:
    """Each argument in words, with where its memory begins and how long it is."""
    for argument in command.pipeline.kernel.arguments if command.pipeline else ():
        buffer, offset = command.bindings[argument.index]
        name = f"argument '{argument.name}' [[buffer({argument.index})]]"
        yield name, buffer.address + offset, buffer.length() - offset


def _place_inside(address: int, command: RecordedCommand) -> str | None:
    """An address in words, where it lies in the memory of an argument."""
    for name, start, size in _arguments(command):
        if start <= address < start + size:
            return f"byte {address - start} of {name}"
    return None


def _nearest_place(address: int, command: RecordedCommand) -> str:
    """An address in words: inside an argument, or by the argument that ends or begins nearest to it."""
    inside = _place_inside(address, command)
    if inside is not None:
        return inside
    best: tuple[int, str] | None = None
    for name, start, size in _arguments(command):
        past_end = address - (start + size)
        distance = past_end if past_end >= 0 else start - address
        where = f"{past_end} bytes past the end of" if past_end >= 0 else f"{distance} bytes before the start of"
        if best is None or distance < best[0]:
            best = distance, f"{where} {name}"
    return best[1] if best and best[0] < _NEARBY_BYTES else "threadgroup memory or memory of no argument"


def create_device(*, check: bool = False, fibers: bool = False, reversed_threads: bool = False) -> MTLDevice:
    """A software GPU.

    Args:
        check: Look at every access of memory: races and accesses out of bounds raise a DeviceError that names the
            kernel, the argument and the thread. Threadgroup memory begins as NaN. Slow; for tests.
        fibers: Run every kernel on fibers, the reference semantics, slowly.
        reversed_threads: On fibers, run the threads of a group last to first: what depends on their order shows.
    """
    runner = functools.partial(_run, reversed_threads=reversed_threads, checked=check)
    execution = Execution.CHECKED if check else Execution.FIBERS if fibers or reversed_threads else Execution.FAST
    return MTLDevice(runner, execution)


@functools.cache
def MTLCreateSystemDefaultDevice() -> MTLDevice:
    """The software GPU of this process."""
    return create_device()
