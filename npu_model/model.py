"""A model in few words: `load` makes it ready, calling it with arrays runs it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from npu_compiler.artifact.output_structure import Structure, build, parse_structure, read_structure
from npu_compiler.compiled_program import CompiledProgram, is_program_file
from npu_compiler.errors import InputError, WeightError
from npu_compiler.ir import TensorSpec
from npu_compiler.partitioner import PartitionPlan, partition
from npu_model.dag_executor import DAGExecutor
from npu_runtime.backend import Backend
from npu_runtime.buffer import NPUBuffer, is_host_array
from npu_runtime.device import Device
from npu_runtime.host_tensors import from_device, is_array, like, on_host
from npu_runtime.weight_loader import Source, load_weights

__all__ = ["Model", "NamedOutputs", "load"]


class NamedOutputs(dict[str, Any]):
    """What a module returns as an object with named fields: ``outputs.logits``, ``outputs["logits"]``, ``outputs[0]``.

    The module's own class is not needed to read it.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the outputs have no field '{name}', they have {', '.join(self)}")

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)


_Weights = Source | str | os.PathLike[str] | None


class _Runner(Protocol):
    """A program or a plan on a device: what it takes and gives, and how it runs."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    structure: Structure

    def run(self, inputs: Mapping[str, Any]) -> Sequence[Any]:
        """The outputs, as arrays and buffers."""

    def load_weights(self, weights: _Weights) -> None:
        """Loads the weights; None where there are none to load."""


class Model:
    """A model that is ready to be called.

    Attributes:
        device: Where it runs.
        inputs: What it takes: name, shape and data type of each input, in order.
        outputs: What it gives, in the order in which the tensors are nested in the module's result.
    """

    def __init__(self, runner: _Runner, device: Device) -> None:
        self._runner, self.device = runner, device
        self.inputs, self.outputs = runner.inputs, runner.outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model once.

        Args:
            args, kwargs: Its inputs in order, or by name: arrays of numpy, torch, CuPy or any library with DLPack, or
                an `NPUBuffer`. One mapping of names to arrays will do too.

        Returns:
            What the module returned, names and nesting kept; an object with named fields becomes `NamedOutputs`. The
            tensors are of the library of the first input that is no `NPUBuffer`, on its device, in the data types that
            the module declares; where all inputs are `NPUBuffer`s, so is what the device made, and what the CPU made is
            an array. A state that was given as a buffer stays one. What the device made for inputs on it does not pass
            through the host.

        Raises:
            InputError: An input is missing, not expected, or has another shape, dtype or device.
            DeviceError: The device failed.
        """
        inputs = self._bound(args, kwargs)
        results = self._runner.run(inputs)
        example = _example(inputs)
        values = [_beside(result, spec, example) for result, spec in zip(results, self.outputs, strict=True)]
        return build(self._runner.structure, values, NamedOutputs)

    def load_weights(self, weights: Source | str | os.PathLike[str]) -> None:
        """Loads other weights in the place of those that it has.

        Args:
            weights: As for `load`.

        Raises:
            WeightError: They are those of another model.
        """
        self._runner.load_weights(weights)

    def __repr__(self) -> str:
        takes, gives = (", ".join(map(str, specs)) for specs in (self.inputs, self.outputs))
        return f"Model('{self._runner.name}' on {self.device.name}: {takes} -> {gives})"

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = [spec.name for spec in self.inputs]
        if len(args) == 1 and isinstance(args[0], Mapping):
            kwargs = {**args[0], **kwargs}
            args = ()
        if len(args) > len(names):
            raise InputError(f"given {len(args)} inputs, expected {len(names)}: {', '.join(names) or 'none'}")
        inputs = dict(zip(names, args, strict=False))
        twice = sorted(inputs.keys() & kwargs.keys())
        if twice:
            raise InputError(f"given the input '{twice[0]}' twice, by its place and by its name")
        return inputs | dict(kwargs)


def load(
    model: Any, weights: Source | str | os.PathLike[str] | None = None, device: Device | Backend | str | None = None
) -> Model:
    """Makes a model ready to be called with arrays.

    Args:
        model: The path of a ``.npubin`` or of IR JSON; or a program, a plan of `npu_compiler.partition`, IR, or what
            `npu_compiler.extract` gave. IR is partitioned for the device.
        weights: A ``.safetensors`` file, a folder with one, or arrays by name, such as ``module.state_dict()``; may be
            omitted where the model needs none, or was just extracted.
        device: Where to run, by name or as a backend too; when omitted the best device of the machine that runs it.

    Raises:
        ProgramFormatError, IRError: The file is damaged, or something else.
        TargetMismatchError: The program or plan was made for another target than the device's.
        WeightError: The weights are missing, or those of another model.
        InputError: The model is none of these.
        NPUError: As `partition`, `Executor` and `DAGExecutor` do.
    """
    if hasattr(model, "ir") and isinstance(getattr(model, "weights", None), Mapping):  # an Extraction
        model, weights = model.ir, model.weights if weights is None else weights
    if isinstance(model, str | os.PathLike) and is_program_file(model):
        model = CompiledProgram.load(model)
    if isinstance(model, CompiledProgram):
        chosen = Device.of(device, model.target)
        return Model(_Program(model, weights, chosen), chosen)
    if not isinstance(model, PartitionPlan):
        _check_ir(model)
        device = Device.of(device)
        model = partition(model, target=device.target)
    chosen = Device.of(device, model.target)
    return Model(_Plan(model, weights, chosen), chosen)


def _check_ir(model: object) -> None:
    is_module = hasattr(model, "state_dict")
    if is_module or not (isinstance(model, str | os.PathLike | Mapping) or hasattr(model, "to_dict")):
        remedy = (
            "npu_compiler.extract(module, example_inputs) makes IR of it"
            if is_module
            else "give the path of a .npubin or of IR JSON"
        )
        raise InputError(f"given a {type(model).__name__} as model, expected a program, a plan or IR; {remedy}")
    if isinstance(model, str | os.PathLike) and os.path.isdir(model):
        raise InputError(
            f"'{model}' is a folder, expected a file; npu_runtime.Generator takes a language model's folder"
        )


class _Program:
    """A compiled program on a device."""

    def __init__(self, program: CompiledProgram, weights: _Weights, device: Device) -> None:
        self.name, plan = program.model, program.main
        self.inputs, self.outputs = (
            tuple(TensorSpec(spec.name, spec.shape, spec.host_dtype) for spec in specs)
            for specs in (plan.inputs, plan.outputs)
        )
        self.structure = parse_structure(plan.structure, len(plan.outputs))
        self._executor = device.backend.create_executor(program)
        self._program, self._device = program, device
        self.load_weights(weights)

    def load_weights(self, weights: _Weights) -> None:
        _check_given(weights, self.name, sum(1 for recipe in self._program.recipes if recipe.inputs))
        self._weights = load_weights({} if weights is None else weights, self._program, self._device)

    def run(self, inputs: Mapping[str, Any]) -> Sequence[Any]:
        sources = dict(self._executor.plan.state)
        if inputs and not sources and all(map(is_host_array, inputs.values())):
            arrays = self._executor.compute(inputs, self._weights)
            return [arrays[spec.name] for spec in self.outputs]
        results = self._executor.run(inputs, self._weights)
        kept = {name for name, source in sources.items() if isinstance(inputs[source], NPUBuffer)}
        return [_Kept(results[spec.name]) if spec.name in kept else results[spec.name] for spec in self.outputs]


class _Plan:
    """A plan on a device and the CPU."""

    def __init__(self, plan: PartitionPlan, weights: _Weights, device: Device) -> None:
        self.name, self.inputs, self.outputs = plan.model, plan.inputs, plan.outputs
        self.structure = read_structure(plan.structure, len(plan.outputs))
        self._executor = DAGExecutor(plan, device)
        self.load_weights(weights)

    def load_weights(self, weights: _Weights) -> None:
        _check_given(weights, self.name, len(self._executor.weight_names))
        if self._executor.weight_names:
            self._executor.load_weights({} if weights is None else weights)

    def run(self, inputs: Mapping[str, Any]) -> Sequence[Any]:
        example = _example(inputs)
        stays = bool(inputs) and (example is None or not on_host(example))
        results, kept = self._executor.execute_with_states(inputs, on_device=stays)
        return [_Kept(results[spec.name]) if spec.name in kept else results[spec.name] for spec in self.outputs]


class _Kept:
    """A buffer that stays where it is."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer


def _example(inputs: Mapping[str, Any]) -> Any:
    """The input whose library and device the results are for; None where all are `NPUBuffer`s."""
    return next((value for value in inputs.values() if not isinstance(value, NPUBuffer)), None)


def _check_given(weights: object, name: str, count: int) -> None:
    if weights is None and count:
        raise WeightError(
            f"'{name}' has {count} weights and none were given, expected a file or arrays by name: "
            "load(model, 'model.safetensors')"
        )


def _beside(result: Any, spec: TensorSpec, example: Any) -> Any:
    """A result in the library of an input, and on its side."""
    if isinstance(result, _Kept):
        return result.buffer
    if not isinstance(result, NPUBuffer):
        return result if example is None or not is_array(example) else like(result, example)
    if example is None:
        return result
    if on_host(example) or not hasattr(result, "__dlpack__"):
        return like(result.to_numpy(), example)
    return from_device(result, spec.dtype.name, example)
