"""An execution plan on CUDA: kernels compiled and loaded, the steps captured as one graph, one launch a run."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuda_compiler.artifact.extensions import cluster_of, is_beside, map_of
from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDADevice
from cuda_runtime.driver import Kernel, Module, encoded_map, record_event
from cuda_runtime.kernel_cache import compiled_kernels
from cuda_runtime.library import check_call
from npu_compiler.artifact.plan import Call, ExecutionPlan, KernelCall, LibraryCall, Role
from npu_compiler.errors import DeviceError
from npu_runtime.backend import PreparedPlan

__all__ = ["CUDAPlan", "updated_inputs"]

_OVERLAP_CAPABILITY = 90  # from here on a kernel may be launched before the one ahead of it has finished
_MAX_GRAPHS = 4


class CUDAPlan(PreparedPlan):
    """A plan that waits for its buffers; its steps become part of a graph when addresses are known."""

    def __init__(self, device: CUDADevice, plan: ExecutionPlan) -> None:
        """Compiles and loads the kernels.

        Raises:
            KernelCompileError: A kernel was refused.
            DeviceError: A step asks for more than the device has, or for an unknown routine of the library.
            MissingDependencyError: The library is not installed.
        """
        self._device = device
        self._calls = plan.calls
        library_calls = [call for call in plan.calls if isinstance(call, LibraryCall)]
        for call in library_calls:
            check_call(call, plan.buffers)
        with device.active():
            self._kernels = _load(plan, device.capability)
            self._library = device.library() if library_calls else None
        self._graphs: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def run(self, buffers: Sequence[Any]) -> None:
        pointers = tuple(buffer.pointer for buffer in buffers)
        with self._device.active():
            if pointers not in self._graphs:
                if len(self._graphs) == _MAX_GRAPHS:
                    self._graphs.popitem(last=False)
                self._graphs[pointers] = self._device.captured(lambda: self.ask(pointers, False))
            self._graphs[pointers].launch(self._device.stream)
            self._synchronize(self._device.stream, "a run")

    def wait(self) -> None:
        """Waits for everything that was asked of the device's stream; the device is the current one.

        Raises:
            DeviceError: The device failed.
        """
        try:
            cupy().cuda.runtime.streamSynchronize(self._device.stream.ptr)
        except cupy().cuda.runtime.CUDARuntimeError as error:
            raise self._failure(error, "a run") from error

    def run_timed(self, buffers: Sequence[Any]) -> list[float]:
        pointers = [buffer.pointer for buffer in buffers]
        event = cupy().cuda.Event
        seconds = []
        self.wait()
        with self._device.aside() as stream:
            for step in self._calls:
                start, end = event(), event()
                start.record(stream)
                self._launch(step, pointers, overlapping=False)
                end.record(stream)
                self._synchronize(stream, f"step '{step.label}'")
                seconds.append(cupy().cuda.get_elapsed_time(start, end) * 1e-3)
        return seconds

    def timer(self, buffers: Sequence[Any], spans: Sequence[range]) -> Callable[[], list[float]]:
        """A run of the whole plan that can be repeated, and gives the seconds that some of its steps took.

        Args:
            buffers: As for `run`.
            spans: Numbers of steps that are timed together, at least one each; in order, without overlap.

        Raises:
            DeviceError: The device refused a command.
        """
        with self._device.active():
            events = [(cupy().cuda.Event(), cupy().cuda.Event()) for _ in spans]
            marks: dict[int, list[Any]] = defaultdict(list)
            for span, (start, end) in zip(spans, events, strict=True):
                marks[span.start].append(start)
                marks[span.stop].append(end)
            pointers = [buffer.pointer for buffer in buffers]
            graph = self._device.captured(lambda: self.ask(pointers, False, marks))

        def run() -> list[float]:
            with self._device.active():
                graph.launch(self._device.stream)
                self._synchronize(self._device.stream, "a timed run")
                return [cupy().cuda.get_elapsed_time(start, end) * 1e-3 for start, end in events]

        return run

    def ask(
        self, pointers: Sequence[int], behind_kernel: bool, marks: Mapping[int, Sequence[Any]] | None = None
    ) -> bool:
        """Asks the device's second stream for all steps.

        Args:
            pointers: The address of each of the plan's buffers.
            behind_kernel: Whether a kernel was asked for last.
            marks: Events to record before the step of a number; before what comes after the last, too.

        Returns:
            Whether one was now.

        Raises:
            DeviceError: The device refused a step.
        """
        marks = marks or {}
        for number, step in enumerate(self._calls):
            self._mark(marks.get(number, ()))
            overlapping = behind_kernel and number not in marks and self._device.capability >= _OVERLAP_CAPABILITY
            self._launch(step, pointers, overlapping)
            behind_kernel = isinstance(step, KernelCall)
        self._mark(marks.get(len(self._calls), ()))
        return behind_kernel

    def _mark(self, events: Sequence[Any]) -> None:
        for event in events:
            record_event(event.ptr, self._device.second_stream.ptr)

    def _launch(self, step: Call, pointers: Sequence[int], overlapping: bool) -> None:
        addresses = [pointers[argument.buffer] + argument.offset for argument in step.args]
        if isinstance(step, LibraryCall):
            assert self._library is not None
            self._library.launch(step, addresses)
            return
        values = [
            address if tensor is None else encoded_map(tensor, address)
            for tensor, address in zip(map(map_of, step.args), addresses, strict=True)
        ]
        self._kernels[step.kernel].launch(
            step.grid,
            step.block,
            cluster_of(step),
            step.shared_bytes,
            values,
            step.params,
            self._device.second_stream.ptr,
            overlapping,
        )

    def _synchronize(self, stream: Any, what: str) -> None:
        try:
            stream.synchronize()
        except cupy().cuda.runtime.CUDARuntimeError as error:
            raise self._failure(error, what) from error

    def _failure(self, error: Exception, what: str) -> DeviceError:
        return DeviceError(
            f"{what} failed on {self._device.name}: {error}; the process can use this device no longer, the profiler "
            "names the step that fails"
        )


def updated_inputs(plan: ExecutionPlan) -> set[int]:
    """The input buffers that the plan writes to."""
    written = {argument.buffer for call in plan.calls for argument in call.args if argument.writes}
    states = {source for _, source in plan.state}
    return {
        index
        for index, buffer in enumerate(plan.buffers)
        if buffer.role is Role.INPUT and (index in written or buffer.name in states)
    }


def _load(plan: ExecutionPlan, capability: int) -> list[Kernel]:
    """The plan's kernels, each in a module of its own: its variables are shared with no other plan."""
    codes = compiled_kernels(plan.kernels, capability)
    shared, beside = [0] * len(plan.kernels), set()
    for call in plan.calls:
        if isinstance(call, KernelCall):
            shared[call.kernel] = max(shared[call.kernel], call.shared_bytes)
            beside |= {call.kernel} if is_beside(call) else set()
    return [
        Module(code).kernel(kernel.entry, shared[number], number in beside)
        for number, (kernel, code) in enumerate(zip(plan.kernels, codes, strict=True))
    ]
