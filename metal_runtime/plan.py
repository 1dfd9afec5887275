"""An execution plan on Metal: pipelines compiled in parallel, bindings resolved, one command buffer a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from metal_runtime.metal_api import MetalApi
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, KernelSource, LibraryCall
from npu_compiler.errors import DeviceError, KernelCompileError
from npu_runtime.backend import DeviceBuffer, PreparedPlan

__all__ = ["MetalPlan"]

_SLOTS = 31  # places for buffers and parameters of a kernel


@dataclass(frozen=True, slots=True)
class _BufferBinding:
    """A plan's buffer at a byte offset, bound to a kernel's argument `index`."""

    index: int
    buffer: int
    offset: int


@dataclass(frozen=True, slots=True)
class _BytesBinding:
    """Packed parameters, bound to a kernel's argument `index`."""

    index: int
    data: bytes


_Binding = _BufferBinding | _BytesBinding


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """One launch, as Metal wants it.

    `new_bindings` are those that differ from what the launches before it left bound; an encoder keeps its bindings.
    """

    label: str
    pipeline: Any
    bindings: tuple[_Binding, ...]
    new_bindings: tuple[_Binding, ...]
    grid: Any
    block: Any


class MetalPlan(PreparedPlan):
    """All steps of a plan, encoded into one command buffer by one encoder, which runs them in order."""

    def __init__(self, api: MetalApi, queue: Any, plan: ExecutionPlan) -> None:
        """Compiles the kernels and resolves the bindings.

        Raises:
            KernelCompileError: A kernel was refused.
            DeviceError: A step needs more threads than its kernel may have, or is a library call.
        """
        self._api, self._queue = api, queue
        self._dispatches = _resolve(api, plan, _pipelines(api, plan.kernels))
        self._what = (
            f"a run of {len(self._dispatches)} steps (the profiler runs them one by one and names the one that fails)"
        )
        self._recording: Any = None

    def run(self, buffers: Sequence[DeviceBuffer]) -> None:
        natives = _natives(buffers)
        if self._api.record is not None:
            self._run_recording(self._api.record, natives)
            return
        with self._api.pool(), self._executing(self._queue.commandBuffer(), self._what) as encoder:
            for dispatch in self._dispatches:
                _encode(encoder, dispatch, dispatch.new_bindings, natives)

    def _run_recording(self, record: Callable[..., Any], natives: Sequence[Any]) -> None:
        """Runs what was encoded before, on these buffers; encodes it where they are the first ones of their lengths."""
        if self._recording is None or not self._recording.takes(natives):
            self._recording = record(self._encoded(natives), list(map(_places, self._dispatches)), natives)
        try:
            self._recording.run(natives)
        except DeviceError as error:
            raise DeviceError(f"{self._what} failed on the device: {error}") from error

    def _encoded(self, natives: Sequence[Any]) -> Any:
        """A command buffer with all steps."""
        command = self._queue.commandBuffer()
        encoder = command.computeCommandEncoder()
        for dispatch in self._dispatches:
            _encode(encoder, dispatch, dispatch.new_bindings, natives)
        encoder.endEncoding()
        return command

    def run_timed(self, buffers: Sequence[DeviceBuffer]) -> list[float]:
        natives = _natives(buffers)
        return [self._time(dispatch, natives) for dispatch in self._dispatches]

    def _time(self, dispatch: _Dispatch, natives: Sequence[Any]) -> float:
        with self._api.pool():
            command = self._queue.commandBuffer()
            with self._executing(command, f"step '{dispatch.label}'") as encoder:
                _encode(encoder, dispatch, dispatch.bindings, natives)
            return float(command.GPUEndTime() - command.GPUStartTime())

    @contextmanager
    def _executing(self, command: Any, what: str) -> Iterator[Any]:
        """The encoder of a command buffer that is executed, and waited for, when the block ends."""
        encoder = command.computeCommandEncoder()
        try:
            yield encoder
        finally:
            encoder.endEncoding()  # Metal aborts the process where an encoder is released open
        try:
            command.commit()
            command.waitUntilCompleted()
        except DeviceError as error:  # the software GPU's way; Apple's is the status
            raise DeviceError(f"{what} failed on the device: {error}") from error
        if command.status() == self._api.module.MTLCommandBufferStatusError:
            raise DeviceError(f"{what} failed on the device: {_reason(command.error())}")


def _places(dispatch: _Dispatch) -> list[tuple[int, int]]:
    """The arguments that other buffers may be bound to: index, and number in the plan."""
    return [(binding.index, binding.buffer) for binding in dispatch.bindings if isinstance(binding, _BufferBinding)]


def _natives(buffers: Sequence[Any]) -> list[Any]:
    return [buffer.native for buffer in buffers]


def _encode(encoder: Any, dispatch: _Dispatch, bindings: tuple[_Binding, ...], natives: Sequence[Any]) -> None:
    try:
        encoder.setComputePipelineState_(dispatch.pipeline)
        for binding in bindings:
            if isinstance(binding, _BufferBinding):
                encoder.setBuffer_offset_atIndex_(natives[binding.buffer], binding.offset, binding.index)
            else:
                encoder.setBytes_length_atIndex_(binding.data, len(binding.data), binding.index)
        encoder.dispatchThreadgroups_threadsPerThreadgroup_(dispatch.grid, dispatch.block)
    except DeviceError as error:
        raise DeviceError(f"step '{dispatch.label}': {error}") from error


def _resolve(api: MetalApi, plan: ExecutionPlan, pipelines: Sequence[Any]) -> list[_Dispatch]:
    size = api.module.MTLSizeMake
    bound: dict[int, _Binding] = {}
    dispatches = []
    for step in plan.calls:
        if isinstance(step, LibraryCall):
            raise DeviceError(
                f"step '{step.label}' calls the library routine '{step.routine}', this Metal backend has no library; "
                "compile the model with this release"
            )
        pipeline = pipelines[step.kernel]
        _check_threads(step, plan.kernels[step.kernel], pipeline)
        bindings = _bindings(step)
        new = tuple(binding for binding in bindings if bound.get(binding.index) != binding)
        bound.update({binding.index: binding for binding in new})
        dispatches.append(_Dispatch(step.label, pipeline, bindings, new, size(*step.grid), size(*step.block)))
    return dispatches


def _bindings(step: KernelCall) -> tuple[_Binding, ...]:
    if len(step.args) + bool(step.params) > _SLOTS:  # Metal itself looks only where it is asked to validate
        raise DeviceError(
            f"step '{step.label}' binds {len(step.args)} buffers, Metal has {_SLOTS} places; compile the model again"
        )
    buffers = [_BufferBinding(index, argument.buffer, argument.offset) for index, argument in enumerate(step.args)]
    return (*buffers, _BytesBinding(len(buffers), step.params)) if step.params else tuple(buffers)


def _check_threads(step: KernelCall, kernel: KernelSource, pipeline: Any) -> None:
    limit = int(pipeline.maxTotalThreadsPerThreadgroup())
    if prod(step.block) > limit:
        raise DeviceError(
            f"step '{step.label}' launches '{kernel.entry}' with {prod(step.block)} threads in a threadgroup, this "
            f"device runs it with at most {limit}; compile the model for a smaller block"
        )


def _pipelines(api: MetalApi, kernels: Sequence[KernelSource]) -> list[Any]:
    """A pipeline for each kernel; a text that several kernels share is compiled once."""
    texts = list(dict.fromkeys(kernel.text for kernel in kernels))
    entries = {text: [kernel.entry for kernel in kernels if kernel.text == text] for text in texts}
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        every = map if len(texts) < 2 else workers.map  # a thread for one takes longer than a kernel that is kept
        compiled = dict(zip(texts, every(lambda text: _compile(api, text, entries[text]), texts), strict=True))
    return [compiled[kernel.text][kernel.entry] for kernel in kernels]


def _compile(api: MetalApi, text: str, entries: Sequence[str]) -> dict[str, Any]:
    """The pipelines of the kernels `entries` of one translation unit."""
    with api.pool():
        options = api.module.MTLCompileOptions.alloc().init()
        options.setFastMathEnabled_(False)  # fast math may assume that no mask is infinite
        library, error = api.device.newLibraryWithSource_options_error_(text, options, None)
        if library is None:
            raise KernelCompileError(f"the device's compiler refused '{entries[0]}':\n{_reason(error)}")
        return {entry: _pipeline(api, library, entry) for entry in entries}


def _pipeline(api: MetalApi, library: Any, entry: str) -> Any:
    function = library.newFunctionWithName_(entry)
    if function is None:
        names = ", ".join(map(str, library.functionNames()))
        raise KernelCompileError(
            f"the program's source has no kernel '{entry}', it has: {names}; compile the model again"
        )
    pipeline, error = api.device.newComputePipelineStateWithFunction_error_(function, None)
    if pipeline is None:
        raise KernelCompileError(f"the device made no pipeline of '{entry}': {_reason(error)}")
    return pipeline


def _reason(error: Any) -> str:
    return str(error.localizedDescription()) if error is not None else "no reason given"
