"""The CPU's part of a model, run by pytorch-ir's executor, which calls PyTorch op by op."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch_ir import IR, IRExecutor
from torch_ir.executor import ExecutionError
from torch_ir.ops import register_executor

import npu_compiler.frontend.coded_operator  # noqa: F401, defines the operator of quantised models
from npu_compiler.artifact.recipes import WeightInput
from npu_compiler.errors import DeviceError, InputError, WeightError
from npu_compiler.frontend.evidence import Names
from npu_compiler.ops.registry import canonical, traits_of
from npu_compiler.partitioning.plan import Partition
from npu_runtime.aten_call import AtenCall
from npu_runtime.host_tensors import as_array, to_numpy, to_torch
from npu_runtime.weight_loader import Source, check_names, check_tensor, open_weights
from npu_runtime.weight_values import check_values

__all__ = ["CPUProgram", "execute_cpu_partition"]

# Executors are registered under names of our own: pytorch-ir takes an executor of one overload for all others too.
_BOUND = "npu_runtime.bound."
_CALL = "call"  # the attribute that holds a node's call


class CPUProgram:
    """A partition on the CPU. Runs from several threads do not disturb each other.

    Attributes:
        notes: What was assumed of arguments that the IR does not record, beyond what the plan says.
    """

    def __init__(self, partition: Partition) -> None:
        """Binds every node's arguments once, so that what cannot run is known before the first run.

        Raises:
            UnsupportedOpError: PyTorch has no such operator.
            IRError: A node's arguments cannot be bound without guessing.
        """
        raw = {key: value for key, value in partition.ir.items() if key != "constants"}
        names = Names((), partition.ir["weight_name_mapping"])
        prepared = [_prepared(node, names) for node in partition.ir["nodes"]]
        raw["nodes"] = [node for node, _ in prepared]
        self.notes = tuple(note for _, note in prepared if note)
        self._ir = IR.from_dict(raw)
        self._outputs = [spec["name"] for spec in partition.ir["graph_outputs"]]
        self._inputs = [(spec["name"], getattr(torch, spec["dtype"])) for spec in partition.ir["graph_inputs"]]
        self._expected = [WeightInput(w["name"], tuple(w["shape"]), w["dtype"]) for w in partition.ir["weights"]]
        constants = partition.ir.get("constants", {})
        self._constants = {w.name: _constant(constants[w.name], w) for w in self._expected if w.name in constants}
        self._take_weights(self._constants)

    def _take_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = dict(weights)
        self._addresses = {_address(tensor) for tensor in weights.values()}

    @property
    def weight_names(self) -> frozenset[str]:
        """Tensors of the weight file that the partition reads."""
        return frozenset(weight.name for weight in self._expected if weight.name not in self._constants)

    def load_weights(self, source: Source) -> None:
        """Takes the partition's weights, in the memory they are in where their dtype is the model's.

        Raises:
            WeightError: A tensor has another shape or dtype than the model declares, or holds NaN.
        """
        weights = dict(self._constants)
        for expected in self._expected:
            if expected.name not in weights:
                array = check_tensor(expected, source[expected.name])
                check_values(expected.name, array)
                weights[expected.name] = to_torch(array).to(getattr(torch, expected.dtype))
        self._take_weights(weights)

    def run(self, tensors: Mapping[str, NDArray[Any] | torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs once.

        Args:
            tensors: At least the partition's inputs, by name. They are not changed.

        Returns:
            The partition's outputs by name, in memory that no input and no weight shares.

        Raises:
            DeviceError: PyTorch refused an operation.
            InputError: It did so for an index beyond its tensor.
        """
        inputs = tuple([self._input(tensors[name], kind) for name, kind in self._inputs])
        weights, taken = self._weights, self._addresses
        with torch.no_grad():
            try:
                results = IRExecutor(self._ir, weights=weights).execute(inputs)
            except ExecutionError as error:
                cause = str(error).replace(_BOUND, "")
                is_index = isinstance(error.__cause__, IndexError) or "out of bounds" in cause
                kind = InputError if is_index else DeviceError
                raise kind(
                    f"PyTorch on the CPU refused an operation: {cause}; check the values of the inputs, such as "
                    "indices out of range"
                ) from error
            taken = taken.union([_address(tensor) for tensor in inputs])
            return {name: _apart(tensor, taken) for name, tensor in zip(self._outputs, results, strict=True)}

    @staticmethod
    def _input(value: NDArray[Any] | torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        tensor = value if isinstance(value, torch.Tensor) else to_torch(value)
        return tensor if tensor.dtype is kind else tensor.to(kind)


def execute_cpu_partition(
    partition: Partition, inputs: Mapping[str, Any], weights: Source | str | os.PathLike[str] | None = None
) -> dict[str, NDArray[Any]]:
    """Runs one partition on the CPU, once. `DAGExecutor` binds its partitions once for all runs instead.

    Args:
        partition: One of a plan's partitions; of those for the device, the ops have to be PyTorch's own.
        inputs: Its inputs by name, as arrays or tensors.
        weights: What `DAGExecutor.load_weights` takes; may be omitted where the partition reads none.

    Returns:
        Its outputs by name.

    Raises:
        InputError: It is no partition, or an input is missing.
        WeightError: As `DAGExecutor.load_weights`.
        UnsupportedOpError, DeviceError: As `CPUProgram`.
    """
    if not isinstance(partition, Partition):
        raise InputError(f"given a {type(partition).__name__}, expected a Partition, such as plan.partitions[0]")
    if not isinstance(inputs, Mapping) or not set(partition.inputs) <= inputs.keys():
        given = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
        raise InputError(f"given the inputs {given or 'none'}, expected arrays by name: {', '.join(partition.inputs)}")
    program = CPUProgram(partition)
    if program.weight_names:
        source = open_weights(weights if weights is not None else {})
        check_names(program.weight_names, source)
        program.load_weights(source)
    results = program.run({name: as_array(inputs[name], f"input '{name}'") for name in partition.inputs})
    return {name: to_numpy(tensor) for name, tensor in results.items()}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _apart(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The tensor in memory of its own: views of inputs and weights are copied."""
    return tensor.clone() if _address(tensor) in taken else tensor


def _prepared(node: Mapping[str, Any], names: Names) -> tuple[dict[str, Any], str]:
    """The node with its call bound, under the name that pytorch-ir finds it by; and what was assumed of its arguments.

    Tensors go by their names alone.
    """
    op, attrs, note = node["op_type"], node["attrs"], ""
    read = [tensor["name"] for tensor in node["inputs"]]
    if traits_of(op).asserts:
        op, attrs = _registered(op), {_CALL: _nothing}
    elif not traits_of(canonical(op)).picks:
        call = AtenCall(node["name"], op)
        attrs, note = call.settled(node, [names[name] for name in read])
        op, attrs = _registered(op), {_CALL: call.bound(attrs, len(read))}
    names.follow(node["op_type"], read, [output["name"] for output in node["outputs"]])
    inputs = [{key: tensor[key] for key in ("name", "shape", "dtype")} for tensor in node["inputs"]]
    return {**node, "op_type": op, "inputs": inputs, "attrs": attrs}, note


@cache
def _registered(op: str) -> str:
    """Has pytorch-ir make a node's own call for an op; gives the name that the op goes by there."""
    register_executor(_BOUND + op)(_call)
    return _BOUND + op


def _call(tensors: Sequence[torch.Tensor], attrs: Mapping[str, Any]) -> list[torch.Tensor]:
    result: list[torch.Tensor] = attrs[_CALL](tensors)
    return result


def _nothing(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """An assertion on shapes and dtypes was checked when the model was extracted."""
    return []


def _constant(value: Any, expected: WeightInput) -> torch.Tensor:
    data = value["data"] if isinstance(value, Mapping) else value
    try:
        return torch.tensor(data, dtype=getattr(torch, expected.dtype)).reshape(expected.shape)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WeightError(
            f"the IR's constant '{expected.name}' is damaged ({error}); extract the model again"
        ) from error
