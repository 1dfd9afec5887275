"""An execution plan on CUDA: kernels compiled and loaded, the steps captured as one graph, one launch a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDABuffer, CUDADevice
from cuda_runtime.driver import Kernel, Module, encoded_map, record_event
from cuda_runtime.kernel_cache import compiled_kernels
from cuda_runtime.library import check_call
from npu_compiler.codegen.plan import Call, ExecutionPlan, KernelCall, LibraryCall, Role
from npu_compiler.errors import DeviceError, InputError
from npu_compiler.memory import ALIGNMENT
from npu_runtime.backend import DeviceBuffer, PreparedPlan

__all__ = ["CUDAPlan", "updated_inputs"]

_OVERLAP_CAPABILITY = 90  # from here on a kernel may be launched before the one ahead of it has finished
_MAX_GRAPHS = 4
_LARGE_BYTES = 1 << 20  # of an input or output; a smaller one is copied in a few microseconds


class CUDAPlan(PreparedPlan):
    """A plan that waits for its buffers.

    A graph holds addresses, and is captured the first time that it sees weights, an arena and states updated in place.
    Small inputs and outputs have memory of the plan's own, which a run copies to and from. Large ones are bound where
    the caller has them, until more than a few graphs would be needed; from then on they are copied too. Outputs are the
    caller's: they stay as they are when the plan runs again.
    """

    def __init__(self, device: CUDADevice, plan: ExecutionPlan) -> None:
        """Compiles and loads the kernels.

        Raises:
            KernelCompileError: A kernel was refused.
            DeviceError: A step asks for more than the device has, or for an unknown routine of the library.
            MissingDependencyError: The library is not installed.
            OutOfMemoryError: The device has too little memory for inputs and outputs.
        """
        self._device = device
        self._calls = plan.calls
        library_calls = [call for call in plan.calls if isinstance(call, LibraryCall)]
        for call in library_calls:
            check_call(call)
        with device.active():
            self._kernels = _load(plan, device.capability)
            self._library = device.library() if library_calls else None
        updated = updated_inputs(plan)
        roles = [buffer.role for buffer in plan.buffers]
        self._inputs = [i for i, role in enumerate(roles) if role is Role.INPUT and i not in updated]
        self._outputs = [i for i, role in enumerate(roles) if role is Role.OUTPUT]
        sizes = {i: plan.buffers[i].nbytes for i in (*self._inputs, *self._outputs)}
        self._large = {i: nbytes for i, nbytes in sizes.items() if nbytes >= _LARGE_BYTES}
        self._own = {i: device.allocate(nbytes) for i, nbytes in sizes.items() if i not in self._large}
        self._graphs: dict[tuple[int, ...], Any] = {}
        self._captures = 0
        self._latest: tuple[Any, list[Any]] | None = None  # a graph, and what must not be freed while it may run again

    def run(self, buffers: Sequence[DeviceBuffer]) -> None:
        self.launch(buffers)
        self.wait()

    def wait(self) -> None:
        """Waits for everything that was launched.

        Raises:
            DeviceError: The device failed.
        """
        with self._device.active():
            self._synchronize(self._device.stream, "a run")

    def launch(self, buffers: Sequence[Any]) -> None:
        """Does as `run` does, but waits for nothing: what is asked of the device later happens later.

        Raises:
            DeviceError: The device refused a command.
        """
        with self._device.active():
            placed = self._placed(buffers)
            graph = self._graph(tuple(buffer.pointer for buffer in placed))
            for index in self._inputs:
                self._copy(buffers[index], placed[index])
            if graph is not None:
                graph.launch(self._device.stream)
            for index in self._outputs:
                self._copy(placed[index], buffers[index])
            self._latest = graph, [placed[index] for index in self._large]

    def replay(self) -> None:
        """Launches the latest graph again, on the inputs that lie there, and leaves the outputs where they are made.

        Where these are large, that may be the memory of the outputs that the latest run gave.

        Raises:
            InputError: There is none yet.
        """
        if self._latest is None:
            raise InputError("given nothing to run again, expected a run before; call run() first")
        graph, _ = self._latest
        if graph is not None:
            with self._device.active():
                graph.launch(self._device.stream)

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
            placed = self._placed(buffers)
            pointers = [buffer.pointer for buffer in placed]
            graph = self._device.captured(lambda: self.ask(pointers, False, marks))

        def run() -> list[float]:
            with self._device.active():
                for index in self._inputs:
                    self._copy(buffers[index], placed[index])
                graph.launch(self._device.stream)
                self._synchronize(self._device.stream, "a timed run")
                return [cupy().cuda.get_elapsed_time(start, end) * 1e-3 for start, end in events]

        return run

    def _placed(self, buffers: Sequence[Any]) -> list[Any]:
        """The memory that the graph of a run works on."""
        direct = [buffer if i in self._large else self._own.get(i, buffer) for i, buffer in enumerate(buffers)]
        known = tuple(buffer.pointer for buffer in direct) in self._graphs
        aligned = all(direct[i].pointer % ALIGNMENT == 0 for i in self._large)
        if known or (aligned and self._captures < _MAX_GRAPHS):
            return direct
        for i, nbytes in self._large.items():
            if i not in self._own:
                self._own[i] = self._device.allocate(nbytes)
        return [self._own.get(i, buffer) for i, buffer in enumerate(buffers)]

    def _graph(self, pointers: tuple[int, ...]) -> Any:
        if pointers not in self._graphs:
            if len(self._graphs) == _MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[pointers] = self._capture(pointers)
            self._captures += 1
        return self._graphs[pointers]

    def _capture(self, pointers: Sequence[int]) -> Any:
        """All steps as one graph; None where there are none."""
        return self._device.captured(lambda: self.ask(pointers, False)) if self._calls else None

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
            address if argument.map is None else encoded_map(argument.map, address)
            for argument, address in zip(step.args, addresses, strict=True)
        ]
        self._kernels[step.kernel].launch(
            step.grid,
            step.block,
            step.cluster,
            step.shared_bytes,
            values,
            step.params,
            self._device.second_stream.ptr,
            overlapping,
        )

    def _copy(self, source: CUDABuffer, target: CUDABuffer) -> None:
        if source.pointer != target.pointer and source.nbytes:
            target.copy_from(source)

    def _synchronize(self, stream: Any, what: str) -> None:
        try:
            stream.synchronize()
        except cupy().cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"{what} failed on {self._device.name}: {error}; the process can use this device no "
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
