"""Runs one function of a compiled program: everything expensive once, then only binding and launching."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self

from numpy.typing import NDArray

from npu_compiler.artifact.plan import Role
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import DType
from npu_compiler.errors import InputError, TargetMismatchError, WeightError
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.array_calls import OwnMemory
from npu_runtime.backend import Backend, BoundPlan, DeviceBuffer
from npu_runtime.buffer import NPUBuffer, is_host_array
from npu_runtime.call_checks import (
    check_input_names,
    check_mapping,
    check_output_names,
    check_program_type,
    choose_function,
    names_of,
)
from npu_runtime.device import Device
from npu_runtime.faults import FaultRecord
from npu_runtime.host_tensors import as_array, is_array, rounded
from npu_runtime.state_guard import exclusive_use
from npu_runtime.tuning import Tuning
from npu_runtime.weight_loader import Weights
from npu_runtime.workspace import Workspace

__all__ = ["Executor"]


class _FixedMemory(NamedTuple):
    """The memory of a plan's buffers that is the same for all runs.

    Attributes:
        key: The plan, the version of its arenas and the weights for which that holds.
        memory: None where an input or output goes.
        inputs, outputs: Their places, with their names.
    """

    key: tuple[object, ...]
    memory: list[DeviceBuffer | None]
    inputs: list[tuple[int, str]]
    outputs: list[tuple[int, str]]


class Executor:
    """One function of a program, ready to run on one device.

    Its intermediate tensors lie in memory that all runs share, so that runs of one executor from several threads wait
    for each other; give each thread an executor of its own to overlap them.

    Attributes:
        device: Where it runs.
        plan: What it replays; of each choice in the program, what this device takes.
    """

    def __new__(
        cls, program: CompiledProgram, device: Device | Backend | str | None = None, *args: Any, **options: Any
    ) -> Self:
        """An executor of the kind that the device has, where no other is named."""
        if cls is not Executor:
            return super().__new__(cls)
        check_program_type(program)
        kind: type[Self] = Device.of(device, program.target).backend.executor_type()
        return super().__new__(kind)

    def __init__(
        self,
        program: CompiledProgram,
        device: Device | Backend | str | None = None,
        function: str | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        """Compiles the kernels, allocates the arena and resolves all bindings.

        Args:
            program: The program.
            device: The device to run on, or its name, or a backend; when omitted the best one of the machine that runs
                programs of this target.
            function: Which of the program's functions; ``main``, or the only one, when omitted.
            workspace: Memory for intermediate tensors on this device. Executors that share one need less, and wait for
                each other; when omitted it has its own.

        Raises:
            TargetMismatchError: The program was compiled for another target.
            InputError: The program has no such function, or an argument is something else.
            DeviceError: The device cannot run a step, or has too little memory.
        """
        check_program_type(program)
        device = Device.of(device, program.target)
        if program.target != device.target:
            wanted = device.target
            raise TargetMismatchError(
                f"'{program.model}' was compiled for the target '{program.target}', {device!r}; compile it again: "
                f"npu_compiler.compile(ir, target='{wanted}') or `npu compile IR.json --target {wanted}`, or leave out "
                "the device for the best one that runs this program"
            )
        self.device = device
        self._backend = device.backend
        self.plan = choose_function(program, function).resolved(self._backend.select)
        self._workspace = workspace or Workspace(self._backend)
        self._workspace.announce(self.plan)
        self._prepared = self._backend.prepare(self.plan)
        self._faults = FaultRecord(self.plan, self._backend)
        self._inputs = {spec.name: spec for spec in self.plan.inputs}
        self._outputs = frozenset(spec.name for spec in self.plan.outputs)
        self._state = dict(self.plan.state)
        self._computed = tuple([spec.name for spec in self.plan.outputs if spec.name not in self._state])
        self._needed = {buffer.name: buffer.nbytes for buffer in self.plan.buffers if buffer.role is Role.WEIGHT}
        self._weights: Weights | None = None  # the last that were checked
        self._lock = self._workspace.lock
        self._fixed: _FixedMemory | None = None
        self._own = self._own_memory()
        self._rounded: frozenset[str] = frozenset()
        self._fetched_as: Mapping[str, DType] = {}

    def run(self, inputs: Mapping[str, Any], weights: Weights | None = None) -> dict[str, NPUBuffer]:
        """Runs once and waits for the result.

        Args:
            inputs: For each input by name a buffer, or a host array as `NPUBuffer.from_numpy` takes it. A buffer that
                the program updates in place changes; an array does not.
            weights: What `load_weights` gave for this program; may be omitted when it has none.

        Returns:
            The outputs by name, in the model's order: new buffers, except that a state updated in place is the input's
            own buffer.

        Raises:
            InputError: An input is missing or not expected, or has another shape, dtype, layout or device; or another
                run updates it in place; or an index lies beyond the dimension that it is for: what is updated in place
                then has the other changes of this run.
            WeightError: The weights are those of another program or device.
            DeviceError: The device failed.
        """
        check_mapping(inputs, self._inputs)
        with self._lock:
            given = self._received(inputs)
            buffers, outputs = self._bind(given, weights)
            with self._updating(given):
                self._prepared.run(buffers)
            self._faults.look()
        return outputs

    def compute(self, inputs: Mapping[str, Any], weights: Weights | None = None) -> dict[str, NDArray[Any]]:
        """Runs once, and gives the outputs as arrays on the host.

        States updated in place stay where they are, and are not among them. Small tensors cross through memory of the
        executor's own, so that a call allocates nothing.

        Args:
            inputs: As for `run`.
            weights: As for `run`.

        Raises:
            NPUError: As `run` does.
        """
        return self.run_and_fetch(inputs, weights, self._computed)[0]

    def run_and_fetch(
        self,
        inputs: Mapping[str, Any],
        weights: Weights | None,
        fetched: Collection[str],
        kept: Collection[str] = (),
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NPUBuffer]]:
        """Runs once, and gives some of the outputs as arrays on the host, and some as they are on the device.

        Args:
            inputs: As for `run`.
            weights: As for `run`.
            fetched: Names of the outputs to bring to the host.
            kept: Names of those to give as buffers, as `run` does; the same ones may be asked for as both.

        Raises:
            InputError: There is no such output.
            NPUError: As `run` does.
        """
        check_mapping(inputs, self._inputs)
        check_output_names((*fetched, *kept), self._outputs)
        with self._lock:
            own, given = self._own, self._received(inputs)
            self._check_inputs(given)
            self._check_weights(weights)
            outputs = {
                spec.name: (None if spec.name in kept else own.output(spec.name)) or self._output(spec, given)
                for spec in self.plan.outputs
            }
            memory = self._memory(given, outputs, weights)
            with self._updating(given):
                self._prepared.run(memory)
            self._faults.look()
            arrays = {name: self._fetched(name, outputs[name]) for name in fetched}
            return arrays, {name: outputs[name] for name in kept}

    def meet_host(self, rounded: Collection[str], dtypes: Mapping[str, DType]) -> None:
        """Says how tensors come from a host that computes, too, and how they go there.

        Args:
            rounded: Inputs in which a number that the device's data type does not hold becomes infinite, as an
                operation on the device would make it; in others it is refused.
            dtypes: The data types in which `run_and_fetch` gives outputs; those that the model declares when omitted.
        """
        self._rounded, self._fetched_as = frozenset(rounded), dict(dtypes)

    def _fetched(self, name: str, output: NPUBuffer) -> NDArray[Any]:
        kind = self._fetched_as.get(name)
        if self._own.output(name) is output:
            return self._own.array(name, kind or output.spec.host_dtype)
        return output.to_numpy(dtype=kind)

    def _own_memory(self) -> OwnMemory:
        updated = {*self._state, *self._state.values()}
        inputs, outputs = (
            [spec for spec in specs if spec.name not in updated] for specs in (self.plan.inputs, self.plan.outputs)
        )
        return OwnMemory(self.device, inputs, outputs)

    def _received(self, inputs: Mapping[str, Any]) -> dict[str, NPUBuffer]:
        """The inputs on the device, small arrays of the host in memory of the executor's own."""
        own, received = self._own, {}
        for name, value in inputs.items():
            value = self._as_taken(name, value)
            takes = own.takes(name) and is_host_array(value)
            received[name] = (
                own.receive(name, as_array(value, f"input '{name}'")) if takes else self._adopted(name, value)
            )
        return received

    def run_timed(
        self, inputs: Mapping[str, Any], weights: Weights | None = None
    ) -> tuple[dict[str, NPUBuffer], list[float]]:
        """Runs as `run` does, one step at a time: the outputs, and the seconds of each step on the device."""
        inputs = self.upload(inputs)
        with self._lock:
            buffers, outputs = self._bind(inputs, weights)
            with self._updating(inputs):
                seconds = self._prepared.run_timed(buffers)
            self._faults.look()
        return outputs, seconds

    def upload(self, inputs: Mapping[str, Any]) -> dict[str, NPUBuffer]:
        """The inputs with a buffer in the place of each host array; what is no array stays, and `run` refuses it.

        Raises:
            InputError: An array does not fit its input.
        """
        check_mapping(inputs, self._inputs)
        return {name: self._adopted(name, self._as_taken(name, value)) for name, value in inputs.items()}

    def _as_taken(self, name: str, value: Any) -> Any:
        """An input as it is, but rounded where `meet_host` says so."""
        rounds = name in self._rounded and is_host_array(value)
        return rounded(value, self._inputs[name].dtype) if rounds else value

    def _adopted(self, name: str, value: Any) -> NPUBuffer:
        """An input on the device."""
        spec = self._inputs.get(name)
        if spec is None or isinstance(value, NPUBuffer) or not is_array(value):
            return value  # type: ignore[no-any-return]  # checked, with every other input, when bound
        return NPUBuffer.from_numpy(value, self.device, spec)

    def bind(
        self, inputs: Mapping[str, NPUBuffer], outputs: Mapping[str, NPUBuffer], weights: Weights | None = None
    ) -> BoundPlan:
        """The plan on this very memory, for loops that own their buffers: calling what this returns runs it once more.

        Everything is checked now, and nothing at the calls, see `BoundPlan`. Runs of the executor itself and of what it
        gave here must not overlap in several threads, as its intermediate tensors are shared.

        Args:
            inputs: A buffer for each input, by name; written by the caller between the calls.
            outputs: Where to put the outputs, but for states updated in place, which are in their inputs. Memory of
                its own for each.
            weights: As for `run`.

        Raises:
            InputError: As `run`; or an output is missing, not expected, or has another shape, dtype, layout or device,
                or lies where an input or another output does.
            WeightError: As `run`.
        """
        self._check_inputs(inputs)
        self._check_weights(weights)
        self._check_outputs(outputs)
        self._check_apart(outputs, inputs)
        states = {name: inputs[source] for name, source in self._state.items()}
        memory = self._memory(inputs, {**outputs, **states}, weights)
        return BoundPlan(self._prepared, memory, self._lock, self._faults.look, self._backend.record)

    def tune(self, inputs: Mapping[str, Any], weights: Weights | None = None) -> Tuning:
        """Times what the compiler left to the device, keeps the winners for this kind of device, and takes them.

        Nothing is left to most kinds of devices (`DeviceKind.tunes`).

        Args:
            inputs: As for `run`; what the program updates in place is left as it was.
            weights: As for `run`.

        Raises:
            NPUError: As `run` does.
        """
        return Tuning(())

    def _updating(self, inputs: Mapping[str, NPUBuffer]) -> AbstractContextManager[None]:
        if not self._state:
            return nullcontext()
        return exclusive_use({source: inputs[source] for source in self._state.values()})

    def _bind(
        self, inputs: Mapping[str, NPUBuffer], weights: Weights | None
    ) -> tuple[list[DeviceBuffer], dict[str, NPUBuffer]]:
        """The memory behind each buffer of the plan, and the outputs to be."""
        self._check_inputs(inputs)
        self._check_weights(weights)
        outputs = {spec.name: self._output(spec, inputs) for spec in self.plan.outputs}
        return self._memory(inputs, outputs, weights), outputs

    def _memory(
        self, inputs: Mapping[str, NPUBuffer], outputs: Mapping[str, NPUBuffer], weights: Weights | None
    ) -> list[DeviceBuffer]:
        fixed = self._fixed
        key = (self.plan, self._workspace.version, weights)
        if fixed is None or any(old is not new for old, new in zip(fixed.key, key, strict=True)):
            fixed = self._fixed = self._fixed_memory(key, weights)
        memory = list(fixed.memory)
        for index, name in fixed.inputs:
            memory[index] = inputs[name].data
        for index, name in fixed.outputs:
            memory[index] = outputs[name].data
        return memory  # type: ignore[return-value]  # every place is filled

    def _fixed_memory(self, key: tuple[object, ...], weights: Weights | None) -> _FixedMemory:
        arenas = self._workspace.arenas(self.plan)
        memory: list[DeviceBuffer | None] = []
        named: dict[Role, list[tuple[int, str]]] = {Role.INPUT: [], Role.OUTPUT: []}
        for index, buffer in enumerate(self.plan.buffers):
            if buffer.role in named:
                named[buffer.role].append((index, buffer.name))
            weight = weights[buffer.name] if weights is not None and buffer.role is Role.WEIGHT else None
            faults = self._faults.memory if buffer.role is Role.FAULTS else None
            memory.append(arenas.get(index, weight or faults))
        return _FixedMemory(key, memory, named[Role.INPUT], named[Role.OUTPUT])

    def _output(self, spec: BufferSpec, inputs: Mapping[str, NPUBuffer]) -> NPUBuffer:
        if spec.name in self._state:
            return NPUBuffer(self.device, inputs[self._state[spec.name]].data, spec)
        return NPUBuffer(self.device, self._backend.allocate(spec.nbytes), spec)

    def _check_inputs(self, inputs: Mapping[str, NPUBuffer]) -> None:
        expected = self._inputs
        check_input_names(inputs, expected)
        for name, spec in expected.items():
            self._check_buffer(f"input '{name}'", inputs[name], spec)
        for source in self._state.values():
            shared = [name for name in inputs if name != source and inputs[name].data is inputs[source].data]
            if shared:
                raise InputError(
                    f"input '{source}' is updated in place and is the same buffer as '{shared[0]}'; give it its own"
                )

    def _check_outputs(self, outputs: Mapping[str, NPUBuffer]) -> None:
        specs = {spec.name: spec for spec in self.plan.outputs if spec.name not in self._state}
        if outputs.keys() != specs.keys():
            raise InputError(f"given memory for the outputs {names_of(outputs)}, expected {names_of(specs)}")
        for name, spec in specs.items():
            self._check_buffer(f"output '{name}'", outputs[name], spec)

    def _check_apart(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Refuses memory for an output that an input or another output has."""
        taken = [(f"input '{name}'", self._memory_of(value)) for name, value in inputs.items()]
        for name, value in outputs.items():
            own = self._memory_of(value)
            other = next((what for what, memory in taken if memory.nbytes and memory.overlaps(own)), None)
            if other is not None:
                raise InputError(f"output '{name}': given the memory of {other}; give each memory of its own")
            taken.append((f"output '{name}'", own))

    def _memory_of(self, value: Any) -> Any:
        """Where an input or output lies: something with `nbytes` and `overlaps`, as a `DeviceBuffer` has them."""
        return value.data

    def _check_buffer(self, what: str, given: object, spec: BufferSpec) -> None:
        remedy = "NPUBuffer.from_numpy(array, device, spec=spec) with the spec from program.input_specs"
        if not isinstance(given, NPUBuffer):
            raise InputError(
                f"{what}: given a {type(given).__name__}, expected an array or an NPUBuffer; make one by {remedy}"
            )
        if not self._backend.shares_memory_with(given.device.backend):
            raise InputError(
                f"{what}: given a buffer on {given.device!r}, expected one on {self.device!r}; make it by {remedy}"
            )
        if not given.fits(spec):
            raise InputError(
                f"{what}: given {_described(given.spec)}, expected {_described(spec)}; make it by {remedy}"
            )

    def _check_weights(self, weights: Weights | None) -> None:
        needed = self._needed
        if not needed or (weights is not None and weights is self._weights):
            return
        remedy = "load them by load_weights(path, program, device)"
        if weights is None:
            raise WeightError(f"given no weights, expected {len(needed)}; {remedy}")
        if not isinstance(weights, Weights):
            raise WeightError(f"given a {type(weights).__name__} as weights, expected Weights; {remedy}")
        if not self._backend.shares_memory_with(weights.backend):
            raise WeightError(f"given weights on {weights.backend.name}, expected them on {self.device!r}; {remedy}")
        wrong = [name for name, nbytes in needed.items() if name not in weights or weights[name].nbytes != nbytes]
        if wrong:
            raise WeightError(
                f"given the weights of another program: {len(wrong)} of {len(needed)} are missing or of another size, "
                f"such as '{wrong[0]}'; {remedy}"
            )
        self._weights_checked(weights)

    def _weights_checked(self, weights: Weights) -> None:
        """What weights that a run can use mean for the runs to come."""
        self._weights = weights


def _described(spec: BufferSpec) -> str:
    strides = ", ".join(map(str, spec.layout.strides))
    return f"{spec.dtype} {spec.shape} in {spec.nbytes} bytes with strides ({strides})"
