"""A model that a command runs: a compiled program, IR that becomes one, or IR divided between device and CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

import npu_compiler
from npu_cli.lowering import compile_whole
from npu_cli.progress import PREPARING, waiting
from npu_cli.tuning_device import open_tuning_device, tuned_target
from npu_compiler.artifact.describe import counted
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError, WeightError
from npu_compiler.ir import TensorSpec
from npu_compiler.partitioner import PartitionPlan
from npu_model import DAGExecutor
from npu_runtime import Device, Executor, NPUBuffer, load_weights

__all__ = ["Model", "open_model"]

_Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Model:
    """A model on a device.

    Attributes:
        device: Where it runs.
        inputs: What it takes, in the data types of the host.
        outputs: Names of what it gives.
        run: Takes the inputs' arrays and the path of the weight file, if there is one, and gives the outputs' arrays.
        measured: Takes the inputs' arrays once the model has run, and gives its plan with what the CPU took; None where
            nothing is divided.
    """

    device: Device
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    run: Callable[[_Arrays, Path | None], _Arrays]
    measured: Callable[[_Arrays], PartitionPlan] | None = None


def open_model(path: Path, device: str | None, *, partition: bool, tune: bool) -> Model:
    """Opens a `.npubin`, or an IR, which is compiled for the device or, with `partition`, divided.

    Args:
        path: The file; IR has the suffix ``.json``.
        device: Name of the device; the best of the machine that runs it when None.
        partition: Whether the CPU runs what the device cannot.
        tune: Whether the first run is preceded by tuning.

    Raises:
        NPUError: The file is neither, the model does not run there, or the options contradict each other.
    """
    if partition and tune:
        raise InputError("given --partition and --tune, expected one of them: tuning is for whole programs")
    if path.suffix != ".json":
        if partition:
            raise InputError(f"given --partition for '{path}', which is compiled as a whole; give the IR.json instead")
        program = CompiledProgram.load(path)
        chosen = open_tuning_device(program, device) if tune else _device_for(program, device)
        return _whole(program, chosen, tune)
    if partition:
        return _divided(path, Device(device))
    if tune:
        program = compile_whole(path, tuned_target())
        return _whole(program, open_tuning_device(program, device), tune)
    chosen = Device(device)
    return _whole(compile_whole(path, chosen.target), chosen, tune)


def _device_for(program: CompiledProgram, name: str | None) -> Device:
    return Device(name) if name else Device.for_target(program.target)


def _whole(program: CompiledProgram, device: Device, tune: bool) -> Model:
    def run(arrays: _Arrays, weight_file: Path | None) -> _Arrays:
        if weight_file is None:
            _require_no_weights(program.model, sum(1 for recipe in program.recipes if recipe.inputs))
        inputs = {spec.name: NPUBuffer.from_numpy(arrays[spec.name], device, spec=spec) for spec in program.input_specs}
        weights = load_weights(weight_file or {}, program, device)
        with waiting(PREPARING):
            executor = Executor(program, device)
            if tune:
                executor.tune(inputs, weights)
            outputs = executor.run(inputs, weights)
        return {spec.name: outputs[spec.name].to_numpy(spec=spec) for spec in program.output_specs}

    inputs = tuple(TensorSpec(spec.name, spec.shape, spec.host_dtype) for spec in program.input_specs)
    return Model(device, inputs, tuple(spec.name for spec in program.output_specs), run)


def _divided(path: Path, device: Device) -> Model:
    with waiting("dividing the model between device and CPU"):
        plan = npu_compiler.partition(path, target=device.target)
    executor: DAGExecutor | None = None

    def run(arrays: _Arrays, weight_file: Path | None) -> _Arrays:
        nonlocal executor
        if weight_file is None:
            _require_no_weights(plan.model, len(plan.weight_keys))
        with waiting(PREPARING):
            executor = DAGExecutor(plan, device)
        if weight_file is not None:
            executor.load_weights(weight_file)
        outputs = executor.execute(arrays)
        return {name: out.to_numpy() if isinstance(out, NPUBuffer) else out for name, out in outputs.items()}

    def measured(arrays: _Arrays) -> PartitionPlan:
        return plan if executor is None else plan.with_measured(executor.cpu_milliseconds(arrays))

    return Model(device, plan.inputs, tuple(spec.name for spec in plan.outputs), run, measured)


def _require_no_weights(model: str, count: int) -> None:
    if count:
        weights = counted(count, "weight")
        raise WeightError(f"'{model}' has {weights} and no file was given; add --weights W.safetensors")
