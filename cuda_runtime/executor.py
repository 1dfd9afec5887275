"""`Executor` with what CUDA adds: tensors of other libraries as inputs, streams, and runs that are not waited for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from numpy.typing import NDArray

from cuda_runtime.backend import CUDABackend
from cuda_runtime.call import Results
from cuda_runtime.calls import Calls
from cuda_runtime.device import CUDABuffer
from cuda_runtime.given import Given, Span, recognized, span
from cuda_runtime.in_flight import InFlight
from cuda_runtime.output_ring import OutputRing, OutputSet
from cuda_runtime.plan import CUDAPlan
from cuda_runtime.tensor import CUDATensor
from cuda_runtime.tuning import Tuner
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import DType
from npu_compiler.errors import DeviceError, InputError, TargetMismatchError
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.backend import Backend, BoundPlan
from npu_runtime.buffer import NPUBuffer, is_device_tensor, is_host_array
from npu_runtime.call_checks import check_output_names, choose_function
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.host_tensors import as_array
from npu_runtime.tuning import Tuning
from npu_runtime.weight_loader import Weights
from npu_runtime.workspace import Workspace

__all__ = ["CUDAExecutor"]

_MOST_RESULTS = 16  # ways in which outputs are fetched; each has memory of its own


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
        self._turn = _Turn(self._lock, self._cuda, may_wait=workspace is not None)
        self._choices = choose_function(program, function)
        self._tunes = tune
        self._make_ready()

    def _make_ready(self) -> None:
        self._results: dict[tuple[object, tuple[str, ...]], Results | None] = {}
        parts = self.plan, self._prepared, self._workspace, self._cuda, self._faults
        self._calls = Calls(*parts, self._check_buffer, self._rounded)
        self._own_outputs = [spec for spec in self.plan.outputs if spec.name not in self._state]
        self._ring = OutputRing(self._new_outputs)
        self._own_set: OutputSet | None = None
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
        with self._turn:
            if stream is not None:
                self._cuda.order(stream, self._own_stream)
            given = self._checked_outputs(outputs, inputs) if outputs is not None else None
            made = self._launch(inputs, weights, given, None, waits=sync and stream is None, ordered=stream is not None)
            if stream is not None:
                self._cuda.order(self._own_stream, stream)
            elif sync:
                self._wait()
            return made

    def run_and_fetch(
        self,
        inputs: Mapping[str, Any],
        weights: Weights | None,
        fetched: Collection[str],
        kept: Collection[str] = (),
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NPUBuffer]]:
        """As `Executor.run_and_fetch`; small outputs reach the host in the same submission."""
        check_output_names(fetched, self._outputs)
        check_output_names(kept, self._outputs)
        if self._tunes:
            self.tune(inputs, weights)
        with self._turn:
            outputs = self._ring.take() if kept else self._fetched_only()
            results = None if outputs is None else self._results_of(outputs, fetched)
            made = self._launch(inputs, weights, outputs, results, waits=True)
            self._wait()
            arrays = {} if results is None else results.arrays()
            if len(arrays) != len(fetched):
                arrays = {name: arrays[name] if name in arrays else made[name].to_numpy() for name in fetched}
            return arrays, {name: made[name] for name in kept} if kept else {}

    def meet_host(self, rounded: Collection[str], dtypes: Mapping[str, DType]) -> None:
        """As `Executor.meet_host`; the device rounds, and makes the outputs' data types."""
        super().meet_host(rounded, dtypes)
        self._make_ready()

    def _fetched_only(self) -> OutputSet:
        """Memory for outputs that are copied before the next run."""
        if self._own_set is None:
            self._own_set = OutputSet("fetched", self._new_outputs())
        return self._own_set

    def _results_of(self, outputs: OutputSet, fetched: Collection[str]) -> Results | None:
        key = outputs.key, tuple(fetched)
        if key not in self._results:
            if len(self._results) == _MOST_RESULTS:
                del self._results[next(iter(self._results))]
            tensors = {name: outputs.tensors[name] for name in fetched if name in outputs.tensors}
            self._results[key] = Results(self._cuda, tensors, self._fetched_as) if tensors else None
        return self._results[key]

    def bind(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], weights: Weights | None = None) -> BoundPlan:
        """As `Executor.bind`; tensors of other libraries on this device are taken, too, where they lie as the program
        reads and writes them. What another library's stream writes into them is waited for by ``stream=`` of the calls.
        """
        specs = {spec.name: spec for spec in self._own_outputs}
        shared = {
            name: self._shared(f"input '{name}'", value, self._inputs.get(name)) for name, value in inputs.items()
        }
        made = {name: self._shared(f"output '{name}'", value, specs.get(name)) for name, value in outputs.items()}
        return super().bind(shared, made, weights)

    def tune(self, inputs: Mapping[str, Any], weights: Weights | None = None) -> Tuning:
        """Times what the compiler left to choose, keeps the winners for this kind of device, and takes them.

        Args:
            inputs: As for `run`; what the program updates in place is left as it was.
            weights: As for `run`.

        Raises:
            NPUError: As `run` does.
        """
        with self._turn:
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

    def _launch(
        self,
        inputs: Mapping[str, Any],
        weights: Weights | None,
        outputs: OutputSet | None,
        results: Results | None,
        *,
        waits: bool,
        ordered: bool = False,
    ) -> dict[str, CUDATensor]:
        values, given = self._recognized(inputs, weights)
        if not ordered:
            own = self._own_stream
            for producer in {each.producer for each in given}:
                if producer is not None and producer != own:
                    self._cuda.order(producer, own)
        call = self._calls.find(values, given, weights, waits)
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
        if name not in self._calls.state_outputs and is_host_array(value):
            return as_array(value, f"input '{name}'")
        return self._adopted(name, value)

    def _wait(self) -> None:
        self._prepared.wait()
        self._in_flight.clear()
        refusal = self._calls.refusal()  # ahead of what raises: it ends what is known of this run's inputs
        self._faults.look()
        if refusal is not None:
            raise refusal

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
        self._check_apart(tensors, inputs)
        return OutputSet(tuple(tensor.data.pointer for tensor in tensors.values()), tensors)

    def _memory_of(self, value: Any) -> Span:
        return span(value)

    def _adopted(self, name: str, value: Any) -> NPUBuffer:
        spec = self._inputs.get(name)
        if spec is None or not is_device_tensor(value):
            return super()._adopted(name, value)
        return CUDATensor.adopt(value, self.device, spec, self._calls.overflow)

    def _shared(self, what: str, value: Any, spec: BufferSpec | None) -> Any:
        """A tensor of another library, on this device, in its own memory; anything else as it is, to be checked."""
        if spec is None or not is_device_tensor(value):
            return value
        tensor = CUDATensor.sharing(value, self.device, spec)
        if tensor is None:
            raise InputError(
                f"{what}: given a tensor that lies in memory as no {spec.dtype} {spec.shape} with strides "
                f"({', '.join(map(str, spec.layout.strides))}) does; make a buffer by NPUBuffer.zeros or from_numpy "
                "with this spec, and share its memory by DLPack"
            )
        return tensor

    def _output(self, spec: BufferSpec, inputs: Mapping[str, NPUBuffer]) -> NPUBuffer:
        output = super()._output(spec, inputs)
        result = CUDATensor(output.device, output.data, spec)
        result.watch(self._faults)
        return result

    def _weights_checked(self, weights: Weights) -> None:
        super()._weights_checked(weights)
        loaded_on = cast(CUDABackend, weights.backend).stream.ptr
        if loaded_on != self._own_stream:
            self._cuda.order(loaded_on, self._own_stream)


class _Turn:
    """An executor for one thread alone, with its device the current one, for a block.

    Raises:
        DeviceError: Another thread is inside; or what CUDA reports in the block.
    """

    def __init__(self, lock: Any, device: CUDABackend, *, may_wait: bool) -> None:
        self._lock, self._may_wait, self._current = lock, may_wait, device.current()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=self._may_wait):
            raise DeviceError("another thread is running this executor; give each thread an executor of its own")
        self._current.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._current.__exit__(*error)
        finally:
            self._lock.release()
