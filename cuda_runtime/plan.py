"""An execution plan on CUDA: kernels compiled and loaded, the steps captured as one graph, one launch a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cuda_runtime.cupy_api import cupy
from cuda_runtime.driver import Kernel, Module, record_event
from cuda_runtime.kernel_cache import compiled_kernels
from cuda_runtime.library import Library, check_call
from npu_compiler.codegen.plan import Call, ExecutionPlan, KernelCall, LibraryCall, Role
from npu_compiler.errors import DeviceError, InputError
from npu_runtime.backend import DeviceBuffer, PreparedPlan

if TYPE_CHECKING:
    from cuda_runtime.backend import CUDABackend, CUDABuffer

__all__ = ["CUDAPlan", "updated_inputs"]

_OVERLAP_CAPABILITY = 90  # from here on a kernel may be launched before the one ahead of it has finished
_MAX_GRAPHS = 4


class CUDAPlan(PreparedPlan):
    """A plan that waits for its buffers.

    A graph holds addresses. Inputs and outputs therefore have memory of their own, which a run copies to and from;
    weights, the arena and states updated in place are bound as they are, and a graph is captured the first time that
    they are seen. Outputs are the caller's: they stay as they are when the plan runs again.
    """

    def __init__(self, backend: CUDABackend, plan: ExecutionPlan) -> None:
        """Compiles and loads the kernels.

        Raises:
            KernelCompileError: A kernel was refused.
            DeviceError: A step asks for more than the device has, or for an unknown routine of the library.
            MissingDependencyError: The library is not installed.
            OutOfMemoryError: The device has too little memory for inputs and outputs.
        """
        self._backend = backend
        self._calls = plan.calls
        library_calls = [call for call in plan.calls if isinstance(call, LibraryCall)]
        for call in library_calls:
            check_call(call)
        with backend.active():
            self._kernels = _load(plan, backend.capability)
            self._library = Library(backend.stream.ptr) if library_calls else None
        updated = updated_inputs(plan)
        roles = [buffer.role for buffer in plan.buffers]
        self._inputs = [i for i, role in enumerate(roles) if role is Role.INPUT and i not in updated]
        self._outputs = [i for i, role in enumerate(roles) if role is Role.OUTPUT]
        self._own = {i: backend.allocate(plan.buffers[i].nbytes) for i in (*self._inputs, *self._outputs)}
        self._bound = [i for i in range(len(roles)) if i not in self._own]
        self._graphs: dict[tuple[int, ...], Any] = {}

    def run(self, buffers: Sequence[DeviceBuffer]) -> None:
        self.launch(buffers)
        self.wait()

    def wait(self) -> None:
        """Waits for everything that was launched.

        Raises:
            DeviceError: The device failed.
        """
        self._synchronize("a run")

    def launch(self, buffers: Sequence[Any]) -> None:
        """Does as `run` does, but waits for nothing: what is asked of the device later happens later.

        Raises:
            DeviceError: The device refused a command.
        """
        with self._backend.active():
            graph = self._graph(buffers)
            for index in self._inputs:
                self._copy(buffers[index], self._own[index])
            if graph is not None:
                graph.launch(self._backend.stream)
            for index in self._outputs:
                self._copy(self._own[index], buffers[index])

    def replay(self) -> None:
        """Launches the latest graph again, on the inputs that lie there, and leaves the outputs where they are made.

        Raises:
            InputError: There is none yet.
        """
        if not self._graphs:
            raise InputError("given nothing to run again, expected a run before; call run() first")
        graph = next(reversed(self._graphs.values()))
        if graph is not None:
            with self._backend.active():
                graph.launch(self._backend.stream)

    def run_timed(self, buffers: Sequence[Any]) -> list[float]:
        pointers = [buffer.pointer for buffer in buffers]
        event = cupy().cuda.Event
        seconds = []
        with self._backend.active():
            for step in self._calls:
                start, end = event(), event()
                start.record(self._backend.stream)
                self._launch(step, pointers, overlapping=False)
                end.record(self._backend.stream)
                self._synchronize(f"step '{step.label}'")
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
        with self._backend.active():
            events = [(cupy().cuda.Event(), cupy().cuda.Event()) for _ in spans]
            marks: dict[int, list[Any]] = defaultdict(list)
            for span, (start, end) in zip(spans, events, strict=True):
                marks[span.start].append(start)
                marks[span.stop].append(end)
            graph = self._capture(self._pointers(buffers), marks)

        def run() -> list[float]:
            with self._backend.active():
                for index in self._inputs:
                    self._copy(buffers[index], self._own[index])
                graph.launch(self._backend.stream)
                self._synchronize("a timed run")
                return [cupy().cuda.get_elapsed_time(start, end) * 1e-3 for start, end in events]

        return run

    def _graph(self, buffers: Sequence[Any]) -> Any:
        key = tuple(buffers[index].pointer for index in self._bound)
        if key not in self._graphs:
            if len(self._graphs) == _MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = self._capture(self._pointers(buffers))
        return self._graphs[key]

    def _pointers(self, buffers: Sequence[Any]) -> list[int]:
        """The addresses that a graph holds."""
        return [self._own.get(index, buffer).pointer for index, buffer in enumerate(buffers)]

    def _capture(self, pointers: Sequence[int], marks: Mapping[int, Sequence[Any]] | None = None) -> Any:
        """All steps as one graph; None where there are none.

        Args:
            pointers: The address of each buffer.
            marks: Events to record before the step of a number; before what comes after the last, too.
        """
        marks = marks or {}
        if not self._calls:
            return None
        stream = self._backend.stream
        stream.begin_capture()
        try:
            for number, step in enumerate(self._calls):
                self._mark(marks.get(number, ()))
                after_kernel = number > 0 and number not in marks and isinstance(self._calls[number - 1], KernelCall)
                self._launch(step, pointers, after_kernel and self._backend.capability >= _OVERLAP_CAPABILITY)
            self._mark(marks.get(len(self._calls), ()))
        finally:
            graph = stream.end_capture()
        return graph

    def _mark(self, events: Sequence[Any]) -> None:
        for event in events:
            record_event(event.ptr, self._backend.stream.ptr)

    def _launch(self, step: Call, pointers: Sequence[int], overlapping: bool) -> None:
        addresses = [pointers[argument.buffer] + argument.offset for argument in step.args]
        if isinstance(step, LibraryCall):
            assert self._library is not None
            self._library.launch(step, addresses)
            return
        self._kernels[step.kernel].launch(
            step.grid,
            step.block,
            step.cluster,
            step.shared_bytes,
            addresses,
            step.params,
            self._backend.stream.ptr,
            overlapping,
        )

    def _copy(self, source: CUDABuffer, target: CUDABuffer) -> None:
        if source.pointer != target.pointer and source.nbytes:
            target.copy_from(source)

    def _synchronize(self, what: str) -> None:
        try:
            self._backend.stream.synchronize()
        except cupy().cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"{what} failed on {self._backend.name}: {error}; the process can use this device no "
                "longer, the profiler names the step that fails"
            ) from error


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
    shared = [0] * len(plan.kernels)
    for call in plan.calls:
        if isinstance(call, KernelCall):
            shared[call.kernel] = max(shared[call.kernel], call.shared_bytes)
    return [
        Module(code).kernel(kernel.entry, nbytes)
        for kernel, code, nbytes in zip(plan.kernels, codes, shared, strict=True)
    ]
