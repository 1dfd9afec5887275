"""Runs a partitioned model: compiled programs on a device, what they cannot do on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError, MissingDependencyError, TargetMismatchError, WeightError
from npu_compiler.partitioning.plan import PartitionPlan
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.backend import Backend
from npu_runtime.buffer import NPUBuffer
from npu_runtime.dag_inputs import GivenInputs, InputChecker
from npu_runtime.dag_run import DAGRun
from npu_runtime.dag_schedule import DeviceStep, Form, Schedule, types_on_host
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.host_tensors import as_array
from npu_runtime.state_guard import exclusive_use
from npu_runtime.weight_loader import Source, Weights, check_names, load_weights, open_weights
from npu_runtime.workspace import Workspace

if TYPE_CHECKING:
    from npu_runtime.cpu_fallback import CPUProgram

__all__ = ["CompileParts", "CompiledPart", "DAGFunction", "PartitionExecutor"]

CompiledPart = tuple[CompiledProgram, str | None]  # a partition's program, and which function of it
CompileParts = Callable[[Mapping[str, Mapping[str, Any]], str], Mapping[str, CompiledPart]]
_MAIN = "main"
_MOST_FORMS = 16


@dataclass(frozen=True)
class DAGFunction:
    """One partition plan, ready to run.

    Attributes:
        plan: What it runs.
        executors: The partitions on the device, by index.
        cpu_programs: The partitions on the CPU, by index.
        device: Where the former run.
    """

    plan: PartitionPlan
    executors: Mapping[int, Executor]
    cpu_programs: Mapping[int, CPUProgram]
    device: Device

    def schedule(self, form: Form) -> Schedule:
        """What a run does whose inputs are given so; found out once."""
        known = self._schedules.get(form)
        if known is None:
            if len(self._schedules) == _MOST_FORMS:
                self._schedules.clear()
            known = Schedule(self.plan, self.executors, self.cpu_programs, self.input_specs, form)
            self._schedules[form] = known
        return known

    @cached_property
    def _schedules(self) -> dict[Form, Schedule]:
        return {}

    @cached_property
    def inputs(self) -> InputChecker:
        return InputChecker(self.plan.inputs, self.input_specs, self.device)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What was assumed where the IR does not say it: as the plan says, and of ops that only PyTorch knows."""
        return (*self.plan.notes, *(note for program in self.cpu_programs.values() for note in program.notes))

    @cached_property
    def input_specs(self) -> Mapping[str, BufferSpec]:
        """For each input that the device reads, how it lies there."""
        inputs = {spec.name for spec in self.plan.inputs}
        specs: dict[str, BufferSpec] = {}
        for executor in self.executors.values():
            for spec in executor.plan.inputs:
                if spec.name in inputs:
                    specs.setdefault(spec.name, spec)
        return specs

    @cached_property
    def state(self) -> frozenset[str]:
        """Inputs that a program updates in place."""
        updated = {source for executor in self.executors.values() for _, source in executor.plan.state}
        return frozenset(updated & set(self.input_specs))

    @cached_property
    def returned_weights(self) -> Mapping[str, str]:
        """Weights that are outputs as they are: their names in the graph and in the weight file."""
        keys = self.plan.weight_keys
        return {name: keys[name] for name in self.plan.output_tensors if name in keys}


class PartitionExecutor:
    """A partitioned model, or several that share their weights, such as a prefill and a decode step.

    What compiles the partitions for the device is handed to it; `npu_runtime.DAGExecutor` is one with this compiler.

    Tensors stay on the device between its partitions, and cross once where the CPU needs them. What crosses keeps its
    values: bfloat16 stays bfloat16. The CPU computes in the data types that the model declares.

    Attributes:
        device: Where the partitions for the device run.
        functions: The plans, ready to run, by name; a lone plan is called ``main``.
    """

    def __init__(
        self,
        plan: PartitionPlan | Mapping[str, PartitionPlan],
        backend: Backend | Device | str | None,
        compile_parts: CompileParts,
    ) -> None:
        """Has the partitions for the device compiled, and binds those for the CPU.

        Args:
            plan: What `npu_compiler.partition` gave; or several plans by name, whose weights are then held once.
            backend: The device to run on, such as ``MetalBackend()``, ``Device("cuda")`` or its name; when omitted the
                best one of the machine that runs programs for the target of the plan.
            compile_parts: Called with the IR of each partition for the device, by a name for it, and with the device's
                target; gives for each name its program, and which of its functions.

        Raises:
            TargetMismatchError: A plan was made for another target.
            NPUError: As `compile_parts` does.
            UnsupportedOpError: PyTorch does not know an op for the CPU either.
            MissingDependencyError: A plan has partitions for the CPU and PyTorch is not installed.
            DeviceError: The device has too little memory, or refuses a kernel.
        """
        plans = _plans(plan)
        self.device = Device.of(backend, next((each.target for each in plans.values() if each.target), None))
        for each in plans.values():
            self._check_target(each)
        cpu_programs = {name: _cpu_programs(each) for name, each in plans.items()}
        parts = {
            _part_name(name, part.index): part.ir
            for name, each in plans.items()
            for part in each.partitions
            if part.on_device
        }
        self._workspace = Workspace(self.device.backend)
        self._programs = compile_parts(parts, self.device.target)
        self.functions = {
            name: DAGFunction(each, self._executors(name, each), cpu_programs[name], self.device)
            for name, each in plans.items()
        }
        self._weights: dict[str, dict[int, Weights]] = {name: {} for name in self.functions}
        self._returned_weights: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in self.functions}
        self._weights_loaded = False
        if not self.weight_names:
            self.load_weights({})  # what the model itself carries, if anything

    @property
    def main(self) -> DAGFunction:
        """The only function, or the one called ``main``."""
        return self.functions[self._main_name]

    @property
    def _main_name(self) -> str:
        return _MAIN if _MAIN in self.functions else next(iter(self.functions))

    @property
    def plan(self) -> PartitionPlan:
        """What `main` runs."""
        return self.main.plan

    @property
    def input_specs(self) -> Mapping[str, BufferSpec]:
        """For each input of `main` that the device reads, how it lies there: the spec for an `NPUBuffer` of it."""
        return self.main.input_specs

    def load_weights(self, weights: Source | str | os.PathLike[str]) -> None:
        """Loads the weights, once for all runs: to the device what the device reads, into PyTorch what the CPU reads.

        Args:
            weights: Arrays or tensors by the names of the IR, such as ``model.state_dict()``, or a ``.safetensors``
                file or a folder with one. Arrays that the CPU reads are used where they lie.

        Raises:
            WeightError: A tensor is missing, has another shape or dtype than the model declares, or holds NaN.
            OutOfMemoryError: The device has too little memory.
        """
        source = open_weights(weights)
        check_names(self.weight_names, source)
        loaded = {id(program): load_weights(source, program, self.device) for program in self._distinct_programs()}
        self._weights = {
            name: {index: loaded[id(self._programs[_part_name(name, index)][0])] for index in function.executors}
            for name, function in self.functions.items()
        }
        for function in self.functions.values():
            for program in function.cpu_programs.values():
                program.load_weights(source)
        self._returned_weights = {
            name: {weight: as_array(source[key], f"'{key}'") for weight, key in function.returned_weights.items()}
            for name, function in self.functions.items()
        }
        self._weights_loaded = True

    def execute(
        self, inputs: Mapping[str, Any], function: str | None = None, *, on_device: bool = False
    ) -> dict[str, NDArray[Any] | NPUBuffer]:
        """Runs the model once.

        An input may be an array or tensor of the shape and dtype that the model declares (any floating-point type where
        that is one), or an `NPUBuffer` of the spec in `input_specs`. A tensor on the device is read where it lies, and
        copied to the host only where the CPU reads it. A buffer that the model updates in place, such as a KV cache, is
        updated where it lies, and never leaves the device: the output that takes its place is an `NPUBuffer` too, of
        the same memory unless a later partition still reads the old value. An array or tensor is not changed.

        Args:
            inputs: A value for each input, by name.
            function: Which of the functions; `main` when omitted.
            on_device: Whether outputs that the device makes stay there, as `NPUBuffer`s.

        Returns:
            The outputs by name, in the dtypes that the model declares.

        Raises:
            InputError: An input is missing, not expected, or of another shape, dtype or device; or a buffer that is
                updated in place is in use by another run; or there is no such function.
            WeightError: The model has weights and none were loaded.
            DeviceError: The device failed, or PyTorch refused an operation.
        """
        return self.execute_with_states(inputs, function, on_device=on_device)[0]

    def execute_with_states(
        self, inputs: Mapping[str, Any], function: str | None = None, *, on_device: bool = False
    ) -> tuple[dict[str, NDArray[Any] | NPUBuffer], frozenset[str]]:
        """As `execute`; and the names of the outputs that take the place of states given as buffers."""
        return self._execute(inputs, function, on_device, None)

    def cpu_milliseconds(
        self, inputs: Mapping[str, Any], function: str | None = None, runs: int = 5
    ) -> dict[int, float]:
        """How long each partition on the CPU takes, by its index: what `PartitionPlan.with_measured` takes.

        Args:
            inputs: As for `execute`, which is called with them once more than `runs` says.
            function: As for `execute`.
            runs: How many runs to take the least time of.

        Raises:
            NPUError: As `execute` does.
        """
        least: dict[int, float] = {}
        for run in range(runs + 1):
            seconds: dict[int, float] = {}
            self._execute(inputs, function, False, seconds)
            if run:  # the first one warms up
                least = {index: min(taken, least.get(index, taken)) for index, taken in seconds.items()}
        return {index: taken * 1e3 for index, taken in least.items()}

    def _execute(
        self, inputs: Mapping[str, Any], function: str | None, on_device: bool, seconds: dict[int, float] | None
    ) -> tuple[dict[str, NDArray[Any] | NPUBuffer], frozenset[str]]:
        """Runs the model once; writes into `seconds`, where given, how long each partition on the CPU took."""
        name = self._main_name if function is None else function
        if not isinstance(name, str) or name not in self.functions:
            raise InputError(f"given the function {name!r:.60}, expected one of {', '.join(self.functions)}")
        if not isinstance(inputs, Mapping):
            raise InputError(f"given a {type(inputs).__name__} as inputs, expected a mapping of names to arrays")
        chosen = self.functions[name]
        if not self._weights_loaded:
            raise WeightError(
                f"'{chosen.plan.model}' has {len(self.weight_names)} weights and none were loaded; call load_weights"
            )
        given = chosen.inputs.taken(inputs)
        states = {source: given.values[source] for source in given.buffers & chosen.state}
        _check_sharing(states, given)
        schedule = chosen.schedule(Form(given.buffers, given.tensors, on_device))
        with exclusive_use(states) if states else nullcontext():
            run = DAGRun(schedule, self.device, given.values, self._returned_weights[name])
            weights = self._weights[name]
            for step in schedule.steps:
                if isinstance(step, DeviceStep):
                    run.on_device(step, weights.get(step.index))
                    continue
                started = perf_counter()
                run.on_cpu(step)
                if seconds is not None:
                    seconds[step.index] = perf_counter() - started
            return run.results(), schedule.kept

    def _check_target(self, plan: PartitionPlan) -> None:
        if plan.target not in (None, self.device.target):
            raise TargetMismatchError(
                f"'{plan.model}' was partitioned for the target '{plan.target}', {self.device!r}; partition it again: "
                f"npu_compiler.partition(ir, target='{self.device.target}')"
            )

    def _executors(self, name: str, plan: PartitionPlan) -> dict[int, Executor]:
        executors = {}
        made_by_cpu = {name for part in plan.partitions if not part.on_device for name in part.outputs}
        read_as = types_on_host(plan)
        for part in plan.partitions:
            if part.on_device:
                program, function = self._programs[_part_name(name, part.index)]
                executor = executors[part.index] = Executor(program, self.device, function, self._workspace)
                floats = {spec.name for spec in executor.plan.inputs if spec.dtype.is_float}
                executor.meet_host(made_by_cpu & floats, read_as)
        return executors

    def _distinct_programs(self) -> list[CompiledProgram]:
        return list({id(program): program for program, _ in self._programs.values()}.values())

    @cached_property
    def weight_names(self) -> frozenset[str]:
        """Tensors of the weight file that the functions need."""
        names: set[str] = set()
        for program in self._distinct_programs():
            names.update(item.name for recipe in program.recipes for item in recipe.inputs)
        for function in self.functions.values():
            names.update(function.returned_weights.values())
            names.update(*(program.weight_names for program in function.cpu_programs.values()))
        return frozenset(names)


def _plans(given: object) -> dict[str, PartitionPlan]:
    """The plans by name; a lone one is called ``main``."""
    plans: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {_MAIN: given}
    if not plans:
        raise InputError("given no plan, expected at least one; npu_compiler.partition makes one")
    for plan in plans.values():
        if not isinstance(plan, PartitionPlan):
            raise InputError(
                f"given a {type(plan).__name__} as plan, expected a PartitionPlan, or several by name; "
                "npu_compiler.partition(ir) makes one"
            )
    return plans


def _part_name(plan: str, index: int) -> str:
    return f"{plan}.{index}"


def _check_sharing(states: Mapping[str, NPUBuffer], given: GivenInputs) -> None:
    for state, buffer in states.items():
        shared = [name for name in given.buffers if name != state and given.values[name].data is buffer.data]
        if shared:
            raise InputError(
                f"input '{state}' is updated in place and is the same buffer as '{shared[0]}'; give it its own"
            )


def _cpu_programs(plan: PartitionPlan) -> dict[int, CPUProgram]:
    parts = [part for part in plan.partitions if not part.on_device]
    if not parts:
        return {}
    for module in ("torch", "torch_ir"):
        if find_spec(module) is None:
            count = sum(len(part.nodes) for part in parts)
            raise MissingDependencyError(
                f"{count} nodes of '{plan.model}' run on the CPU, which needs the package '{module}', and it is not "
                "installed; the extra 'torch' has it: pip install 'npu-compiler[torch]', with uv add --extra torch to "
                "the other extras; plan.report() says what keeps them off the device"
            )
    from npu_runtime.cpu_fallback import CPUProgram

    return {part.index: CPUProgram(part) for part in parts}
