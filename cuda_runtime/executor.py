"""`Executor` with what CUDA adds: tensors of other libraries as inputs, streams, and runs that are not waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from numpy.typing import NDArray

from cuda_runtime.backend import CUDABackend
from cuda_runtime.call import Results
from cuda_runtime.calls import Calls
from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDABuffer
from cuda_runtime.given import Given, recognized
from cuda_runtime.in_flight import InFlight
from cuda_runtime.output_ring import OutputRing, OutputSet
from cuda_runtime.plan import CUDAPlan
from cuda_runtime.tensor import CUDATensor
from cuda_runtime.tuning import Tuner, Tuning
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import DeviceError, InputError, TargetMismatchError
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.backend import Backend
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor, choose_function
from npu_runtime.host_tensors import as_array, is_array, on_host
from npu_runtime.weight_loader import Weights
from npu_runtime.workspace import Workspace

__all__ = ["CUDAExecutor"]


class CUDAExecutor(Executor):
    """One function of a program, ready to run on one CUDA device.

    What a run has to do is found out, checked and captured as a graph when inputs of a form first come; from then on a
    run recognises them, copies what must be copied, and launches the graph.
    """

    _prepared: CUDAPlan

    def __init__(
        self,
        program: CompiledProgram,
        device: Device | Backend | str | None = None,
        function: str | None = None,
        workspace: Workspace | None = None,
        *,
        tune: bool = False,
    ) -> None:
        """Does as `Executor`'s.

        Args:
            program: The program.
            device: A CUDA device, its name or its backend; ``cuda`` when omitted.
            function: Which of the program's functions; ``main``, or the only one, when omitted.
            workspace: As for `Executor`.
            tune: Whether the first run is preceded by `tune` on its inputs.

        Raises:
            TargetMismatchError: The device is no CUDA device, or the program was compiled for another target.
            NPUError: As `Executor`'s.
        """
        device = Device.of("cuda" if device is None else device)
        if not isinstance(device.backend, CUDABackend):
            raise TargetMismatchError(f"given {device!r}, expected a CUDA device: Device('cuda')")
        super().__init__(program, device, function, workspace)
        self._cuda = device.backend
        self._own_stream = int(self._cuda.stream.ptr)
        self._cuda_error = cupy().cuda.runtime.CUDARuntimeError
        self._device_before = self._cuda.ordinal
        self._shares = workspace is not None
        self._choices = choose_function(program, function)
        self._tunes = tune
        self._make_ready()

    def _make_ready(self) -> None:
        self._calls = Calls(self.plan, self._prepared, self._workspace, self._cuda, self._faults, self._check_buffer)
        self._own_outputs = [spec for spec in self.plan.outputs if spec.name not in self._state]
        self._ring = OutputRing(self._new_outputs)
        self._copied: tuple[OutputSet, Results] | None = None  # outputs that are copied before the next run
        self._in_flight = InFlight(self._cuda)
        self._latest: tuple[Any, object] | None = None

    def run(  # type: ignore[override]  # inputs may be more than NPUBuffer
        self,
        inputs: Mapping[str, Any],
        weights: Weights | None = None,
        *,
        outputs: Mapping[str, NPUBuffer] | None = None,
        sync: bool = True,
        stream: Any = None,
    ) -> dict[str, CUDATensor]:
        """Runs once.

        Args:
            inputs: For each input by name an `NPUBuffer`, or a tensor of CuPy, torch or another library, on this device
                or on the host. One on the host may change when this returns.
            weights: What `load_weights` gave for this program.
            outputs: Where to put the outputs, but for states updated in place; when omitted, in memory that nobody
                holds.
            sync: Whether to wait for the result. Else the outputs are still being made when this returns; copying one
                to the host waits for it, and so does whoever takes it by DLPack. An index beyond its tensor is then
                reported by the next call that waits: a run, or `CUDATensor.to_numpy` of an output.
            stream: A stream of CuPy or torch, or its handle: inputs made on it are waited for, and what is asked of it
                later waits for the outputs; the host does not.

        Returns:
            The outputs by name. No later run touches them while anybody holds them, or a view of their memory.

        Raises:
            InputError: An input is missing or not expected, or has another shape, dtype or device; or another run
                updates it in place; or an index lies beyond the dimension that it is for, as in `Executor.run`, in this
                run or one before that was not waited for.
            WeightError: The weights are those of another program or device.
            DeviceError: The device failed, or another thread is inside of this executor.
        """
        if self._tunes:
            self.tune(inputs, weights)
        self._enter()
        try:
            if stream is not None:
                self._order(_handle(stream), self._own_stream)
            given = self._checked_outputs(outputs, inputs) if outputs is not None else None
            made = self._launch(inputs, weights, given, None, ordered=stream is not None)
            if stream is not None:
                self._order(self._own_stream, _handle(stream))
            elif sync:
                self._wait()
            return made
        except self._cuda_error as error:
            raise self._cuda.translated(error) from error
        finally:
            self._leave()

    def compute(self, inputs: Mapping[str, Any], weights: Weights | None = None) -> dict[str, NDArray[Any]]:
        """As `Executor.compute`; small outputs reach the host in the same submission."""
        if self._tunes:
            self.tune(inputs, weights)
        self._enter()
        try:
            if self._copied is None:
                tensors = self._new_outputs()
                self._copied = OutputSet("copied", tensors), Results(self._cuda, tensors)
            self._launch(inputs, weights, *self._copied)
            self._wait()
            return self._copied[1].arrays()
        except self._cuda_error as error:
            raise self._cuda.translated(error) from error
        finally:
            self._leave()

    def tune(self, inputs: Mapping[str, Any], weights: Weights | None = None) -> Tuning:
        """Times what the compiler left to choose, keeps the winners for this kind of device, and takes them.

        Args:
            inputs: As for `run`; what the program updates in place is left as it was.
            weights: As for `run`.

        Raises:
            NPUError: As `run` does.
        """
        self._enter()
        try:
            adopted = {name: self._adopted(name, value) for name, value in inputs.items()}
            buffers, _ = self._bind(adopted, weights)
            with self._updating(adopted):
                tuning = Tuner(self._choices, self._cuda, cast("list[CUDABuffer]", buffers)).tune()
            self.plan = self._choices.resolved(self._cuda.select)
            self._prepared = self._cuda.prepare(self.plan)
            self._make_ready()
            self._tunes = False
            self._faults.look()
            return tuning
        finally:
            self._leave()

    @property
    def stream(self) -> int:
        """Handle of the stream that everything runs on."""
        return self._own_stream

    def replay(self) -> None:
        """Runs once more on the inputs of the last run and into its outputs, without waiting.

        Raises:
            InputError: Nothing was run yet.
        """
        if self._latest is None:
            raise InputError("given nothing to run again, expected a run before; call run() first")
        if self._latest[0] is not None:
            self._latest[0].launch(self._cuda.stream)

    def _enter(self) -> None:
        """Takes the executor for this thread alone, and makes its device the current one; `_leave` undoes both."""
        if not self._lock.acquire(blocking=self._shares):
            raise DeviceError("another thread is running this executor; give each thread an executor of its own")
        runtime = cupy().cuda.runtime
        self._device_before = runtime.getDevice()
        if self._device_before != self._cuda.ordinal:
            runtime.setDevice(self._cuda.ordinal)

    def _leave(self) -> None:
        if self._device_before != self._cuda.ordinal:
            cupy().cuda.runtime.setDevice(self._device_before)
        self._lock.release()

    def _launch(
        self,
        inputs: Mapping[str, Any],
        weights: Weights | None,
        outputs: OutputSet | None,
        results: Results | None,
        *,
        ordered: bool = False,
    ) -> dict[str, CUDATensor]:
        values, given = self._recognized(inputs, weights)
        if not ordered:
            own = self._own_stream
            for producer in {each.producer for each in given}:
                if producer is not None and producer != own:
                    self._order(producer, own)
        call = self._calls.find(values, given, weights)
        free = outputs or self._ring.take()
        taken = free or self._calls.spare(self._new_outputs)
        if self._state:
            states = {source: values[number] for number, source in self._calls.states}
            with self._updating(states):
                graph = call.launch(values, self._calls.numbers, taken, results)
        else:
            graph = call.launch(values, self._calls.numbers, taken, results)
        made = dict(taken.tensors) if free else self._copies(taken)
        self._in_flight.add(values)
        self._latest = graph, values
        if self._faults.memory is not None:
            for tensor in made.values():
                tensor.watch(self._faults)
        if self._state:
            for number, source in self._calls.states:
                name = self._calls.state_outputs[source]
                made[name] = CUDATensor(self.device, values[number].data, self._calls.output_specs[name])
                made[name].watch(self._faults)
            made = {name: made[name] for name in self._calls.output_specs}
        return made

    def _recognized(self, inputs: Mapping[str, Any], weights: Weights | None) -> tuple[list[Any], list[Given]]:
        """The inputs in the plan's order, and what is known of each."""
        if inputs.keys() != self._inputs.keys():
            self._check_inputs(inputs)
        self._check_weights(weights)
        values = [inputs[name] for name in self._inputs]
        given = []
        for number, name in enumerate(self._inputs):
            known = recognized(values[number])
            if known is None or (name in self._calls.state_outputs and known.form[0] != "npu"):
                values[number] = self._brought(name, values[number])
                known = recognized(values[number])
                if known is None:
                    self._check_buffer(f"input '{name}'", values[number], self._inputs[name])
                    raise InputError(f"input '{name}': given a buffer of another device, expected {self.device!r}")
            given.append(known)
        return values, given

    def _brought(self, name: str, value: Any) -> Any:
        """An input of another kind as one that is recognised: an array of the host, or a tensor of this device."""
        is_state = name in self._calls.state_outputs
        if not is_state and not isinstance(value, NPUBuffer) and is_array(value) and on_host(value):
            return as_array(value, f"input '{name}'")
        return self._adopted(name, value)

    def _wait(self) -> None:
        self._prepared.wait()
        self._in_flight.clear()
        self._faults.look()
        self._calls.check_overflow()

    def _new_outputs(self) -> dict[str, CUDATensor]:
        return {
            spec.name: CUDATensor(self.device, self._cuda.allocate(spec.nbytes), spec) for spec in self._own_outputs
        }

    def _copies(self, taken: OutputSet) -> dict[str, CUDATensor]:
        made = self._new_outputs()
        for name, tensor in made.items():
            tensor.data.copy_from(taken.tensors[name].data)
        return made

    def _checked_outputs(self, outputs: Mapping[str, NPUBuffer], inputs: Mapping[str, Any]) -> OutputSet:
        self._check_outputs(outputs)
        tensors = {spec.name: CUDATensor(self.device, outputs[spec.name].data, spec) for spec in self._own_outputs}
        pointers = tuple(tensor.data.pointer for tensor in tensors.values())
        given = {known.address: name for name, value in inputs.items() if (known := recognized(value)) is not None}
        shared = [given[pointer] for pointer in pointers if pointer in given]
        if shared or len(set(pointers)) != len(pointers):
            raise InputError(
                f"given memory for an output that is also {shared[0] if shared else 'another output'}'s; give each "
                "memory of its own"
            )
        return OutputSet(pointers, tensors)

    def _adopted(self, name: str, value: Any) -> NPUBuffer:
        spec = self._inputs.get(name)
        on_device = hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
        if spec is None or isinstance(value, NPUBuffer) or not on_device or on_host(value):
            return super()._adopted(name, value)
        return CUDATensor.adopt(value, self.device, spec)

    def _output(self, spec: BufferSpec, inputs: Mapping[str, NPUBuffer]) -> NPUBuffer:
        output = super()._output(spec, inputs)
        result = CUDATensor(output.device, output.data, spec)
        result.watch(self._faults)
        return result

    def _weights_checked(self, weights: Weights) -> None:
        super()._weights_checked(weights)
        loaded_on = cast(CUDABackend, weights.backend).stream.ptr
        if loaded_on != self._own_stream:
            self._order(loaded_on, self._own_stream)

    def _order(self, first: int, then: int) -> None:
        """Makes what is asked of the stream `then` from now on wait for what was asked of the stream `first`."""
        runtime, event = cupy().cuda.runtime, self._cuda.order_event
        runtime.eventRecord(event.ptr, first)
        runtime.streamWaitEvent(then, event.ptr)


def _handle(stream: Any) -> int:
    handle = stream if isinstance(stream, int) else getattr(stream, "ptr", getattr(stream, "cuda_stream", None))
    if not isinstance(handle, int):
        raise DeviceError(f"given a {type(stream).__name__} as stream, expected one of CuPy or torch, or its handle")
    return handle
