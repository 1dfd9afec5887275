"""Runs a partitioned model: compiled programs on a device, what they cannot do on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from npu_compiler.compiler import compile
from npu_compiler.errors import InputError, MissingDependencyError, TargetMismatchError, WeightError
from npu_compiler.layout import BufferSpec
from npu_compiler.partitioner import PartitionPlan
from npu_runtime.backend import Backend
from npu_runtime.buffer import NPUBuffer
from npu_runtime.dag_run import DAGRun, Lifetimes
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.safetensors_file import open_safetensors
from npu_runtime.state_guard import exclusive_use
from npu_runtime.weight_loader import Weights, check_names, load_weights

if TYPE_CHECKING:
    from npu_runtime.cpu_fallback import CPUProgram

__all__ = ["DAGExecutor"]


class DAGExecutor:
    """A partition plan, ready to run.

    Tensors stay on the device between its partitions, and cross once where the CPU needs them. What crosses keeps its
    values: bfloat16 stays bfloat16. The CPU computes in the data types that the model declares.

    Attributes:
        plan: What it runs.
        device: Where the partitions for the device run.
        input_specs: For each input that the device reads, how it lies there: the spec for an `NPUBuffer` of it.
    """

    def __init__(self, plan: PartitionPlan, backend: Backend | Device) -> None:
        """Compiles the partitions for the device, all as functions of one program, and binds those for the CPU.

        Args:
            plan: What `npu_compiler.partition` gave.
            backend: The device to run on, such as ``MetalBackend()`` or ``Device("cuda")``.

        Raises:
            TargetMismatchError: The plan was made for another target.
            UnsupportedOpError: A node does not lower although a callback said so, or PyTorch does not know it either.
            MissingDependencyError: The plan has partitions for the CPU and PyTorch is not installed.
            DeviceError: The device has too little memory, or refuses a kernel.
        """
        if not isinstance(backend, (Backend, Device)):
            raise InputError(f"given a {type(backend).__name__}, expected a backend or a Device; Device() is the best")
        self.plan = plan
        self.device = backend if isinstance(backend, Device) else Device(backend)
        if plan.target not in (None, self.device.target):
            raise TargetMismatchError(
                f"'{plan.model}' was partitioned for the target '{plan.target}', {self.device!r}; partition it again: "
                f"npu_compiler.partition(ir, target='{self.device.target}')"
            )
        on_device = {str(part.index): part.ir for part in plan.partitions if part.on_device}
        self._program = compile(on_device, self.device.target) if on_device else None
        self._executors: dict[int, Executor] = {}
        if self._program is not None:
            self._executors = {int(name): Executor(self._program, self.device, name) for name in on_device}
        self._cpu_programs = _cpu_programs(plan)
        self.input_specs = self._input_specs()
        self._state = self._updated_inputs()
        self._lifetimes = Lifetimes.of(plan)
        self._weights: Weights | None = None
        self._returned_weights: dict[str, NDArray[Any]] = {}
        self._weights_loaded = not self._weight_names()

    def load_weights(self, weights: Mapping[str, NDArray[Any]] | str | os.PathLike[str]) -> None:
        """Loads the weights, once for all runs: to the device what the device reads, into PyTorch what the CPU reads.

        Args:
            weights: numpy arrays by the names of the IR, or a ``.safetensors`` file or a folder with one. Arrays that
                the CPU reads are used where they lie.

        Raises:
            WeightError: A tensor is missing, or has another shape or dtype than the model declares.
            OutOfMemoryError: The device has too little memory.
        """
        source = weights if isinstance(weights, Mapping) else open_safetensors(Path(weights))
        check_names(self._weight_names(), source)
        if self._program is not None:
            self._weights = load_weights(source, self._program, self.device)
        for program in self._cpu_programs.values():
            program.load_weights(source)
        self._returned_weights = {name: source[key] for name, key in self._returned().items()}
        self._weights_loaded = True

    def execute(self, inputs: Mapping[str, NDArray[Any] | NPUBuffer]) -> dict[str, NDArray[Any] | NPUBuffer]:
        """Runs the model once.

        An input may be a numpy array of the shape and dtype that the model declares (any floating-point type where
        that is one), or an `NPUBuffer` of the spec in `input_specs`. A buffer that the model updates in place, such as
        a KV cache, is updated where it lies, and never leaves the device: the output that takes its place is an
        `NPUBuffer` too, of the same memory unless a later partition still reads the old value. An array is not changed.

        Args:
            inputs: A value for each input, by name.

        Returns:
            The outputs by name, in the dtypes that the model declares.

        Raises:
            InputError: An input is missing, not expected, or of another shape, dtype or device; or a buffer that is
                updated in place is in use by another run.
            WeightError: The model has weights and none were loaded.
            DeviceError: The device failed, or PyTorch refused an operation.
        """
        if not self._weights_loaded:
            raise WeightError(
                f"'{self.plan.model}' has {len(self._weight_names())} weights and none were loaded; call load_weights"
            )
        buffers = {name: value for name, value in inputs.items() if isinstance(value, NPUBuffer)}
        self._check_sharing(buffers)
        with exclusive_use({name: buffer for name, buffer in buffers.items() if name in self._state}):
            run = DAGRun(self.plan, self._lifetimes, self.device, self._returned_weights)
            run.take(inputs, self.input_specs)
            for part in self.plan.partitions:
                if part.on_device:
                    run.on_device(part, self._executors[part.index], self._weights)
                else:
                    run.on_cpu(part, self._cpu_programs[part.index])
            return run.results()

    def _weight_names(self) -> frozenset[str]:
        """Tensors of the weight file that the model needs."""
        names = set(self._returned().values())
        if self._program is not None:
            names.update(item.name for recipe in self._program.recipes for item in recipe.inputs)
        return frozenset(names.union(*(program.weight_names for program in self._cpu_programs.values())))

    def _returned(self) -> dict[str, str]:
        """Weights that are outputs of the model as they are: their names in the graph and in the weight file."""
        keys = self.plan.weight_keys
        return {name: keys[name] for name in self.plan.output_tensors if name in keys}

    def _input_specs(self) -> dict[str, BufferSpec]:
        inputs = {spec.name for spec in self.plan.inputs}
        specs: dict[str, BufferSpec] = {}
        for executor in self._executors.values():
            for spec in executor.plan.inputs:
                if spec.name in inputs:
                    specs.setdefault(spec.name, spec)
        return specs

    def _updated_inputs(self) -> frozenset[str]:
        """Inputs of the model that a program updates in place."""
        updated = {source for executor in self._executors.values() for _, source in executor.plan.state}
        return frozenset(updated & set(self.input_specs))

    def _check_sharing(self, buffers: Mapping[str, NPUBuffer]) -> None:
        for state in self._state & buffers.keys():
            shared = [n for n, buffer in buffers.items() if n != state and buffer.data is buffers[state].data]
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
                "installed; install the extra that has it: pip install 'npu-compiler[torch]', or see plan.report() for "
                "what keeps them off the device"
            )
    from npu_runtime.cpu_fallback import CPUProgram

    return {part.index: CPUProgram(part) for part in parts}
