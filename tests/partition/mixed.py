"""Extracts, partitions and runs models, and compares the result with PyTorch run whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from npu_compiler import extract, partition
from npu_compiler.ops.registry import is_in_place, traits_of
from npu_compiler.partitioner import PartitionPlan
from npu_runtime import DAGExecutor, Device
from npu_runtime.cpu_fallback import CPUProgram
from npu_runtime.host_tensors import to_numpy

__all__ = ["array", "arrays_of", "check_equal", "check_mixed", "check_plan", "run_plan_on_cpu", "sides"]

Array = NDArray[Any]


def array(value: object) -> Array:
    """A result that has to be an array."""
    assert isinstance(value, np.ndarray)
    return value


def arrays_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {name: to_numpy(tensor) for name, tensor in tensors.items()}


def sides(plan: PartitionPlan) -> list[str]:
    return [part.device for part in plan.partitions]


def check_mixed(
    model: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    device: Device,
    rtol: float = 5e-3,
    **options: Any,
) -> PartitionPlan:
    """Runs a model in partitions and compares every output with PyTorch, in dtype, shape and values.

    Integers and booleans must be equal, floating-point values within `rtol` of the largest.
    """
    extraction = extract(model.eval(), inputs)
    ir = json.loads(json.dumps(extraction.ir))
    plan = partition(ir, **options)
    check_plan(plan, ir)
    executor = DAGExecutor(plan, device)
    executor.load_weights(arrays_of(extraction.weights))
    names = [spec.name for spec in plan.inputs]
    given = {name: to_numpy(tensor.clone()) for name, tensor in zip(names, inputs, strict=True)}
    kept = {name: array.copy() for name, array in given.items()}
    for _ in range(2):  # a second run must not see anything of the first
        results = executor.execute(given)
        with torch.no_grad():
            expected = model(*(tensor.clone() for tensor in inputs))
        expected = (expected,) if isinstance(expected, torch.Tensor) else tuple(expected)
        for (name, result), wanted in zip(results.items(), expected, strict=True):
            assert isinstance(result, np.ndarray)
            check_equal(name, result, wanted, rtol)
    for name, array in given.items():
        np.testing.assert_array_equal(array, kept[name], err_msg=f"input '{name}' was changed")
    return plan


def check_equal(name: str, result: Array, wanted: torch.Tensor, rtol: float) -> None:
    assert result.dtype.name == str(wanted.dtype).removeprefix("torch."), name
    assert result.shape == tuple(wanted.shape), name
    if not wanted.dtype.is_floating_point and not wanted.dtype.is_complex:
        np.testing.assert_array_equal(result, wanted.numpy(), err_msg=name)
        return
    wide = np.complex128 if wanted.dtype.is_complex else np.float64
    exact = to_numpy(wanted).astype(wide)
    largest = float(np.abs(exact).max(initial=0.0)) or 1.0
    np.testing.assert_allclose(result.astype(wide), exact, rtol=0, atol=rtol * largest, err_msg=name)


def check_plan(plan: PartitionPlan, ir: Mapping[str, Any]) -> None:
    """Every node once, no partition before what it reads, transfers for all that crosses and for nothing else.

    What no input reaches may be in several partitions. Where something changes in place, or is read for its shape, the
    plan has nodes that the IR has not, and the other way round.
    """
    placed = [name for part in plan.partitions for name in part.nodes]
    outputs = [name for part in plan.partitions for name in part.outputs]
    assert len(set(outputs)) == len(outputs)
    if all(traits_of(node["op_type"]).reads_first and not is_in_place(node["op_type"]) for node in ir["nodes"]):
        assert set(placed) == {node["name"] for node in ir["nodes"]}
    made: dict[str, int | None] = {spec.name: None for spec in plan.inputs}
    on_device = [part.on_device for part in plan.partitions]
    needed: set[tuple[str, str]] = set()
    for part in plan.partitions:
        assert part.index == plan.partitions.index(part)
        assert set(part.reasons) == (set() if part.on_device else set(part.nodes))
        assert all(part.reasons.values())
        for name in part.inputs:
            source = made[name]
            made_on_device = source is not None and on_device[source]
            if made_on_device != part.on_device:
                needed.add((name, "to_npu" if part.on_device else "to_cpu"))
        for name in part.outputs:
            assert name not in made
            made[name] = part.index
    for name in plan.output_tensors:
        source = made.get(name)
        if source is not None and on_device[source]:
            needed.add((name, "to_cpu"))
    given = [(transfer.tensor, transfer.direction) for transfer in plan.transfers]
    assert len(given) == len(set(given))
    assert set(given) == needed
    assert all(transfer.source == made[transfer.tensor] for transfer in plan.transfers)


def run_plan_on_cpu(plan: PartitionPlan, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a plan without weights and without a device: every partition in PyTorch, in the order of the plan."""
    tensors = dict(inputs)
    for part in plan.partitions:
        tensors.update(CPUProgram(replace(part, device="cpu")).run(tensors))
    return {spec.name: tensors[name] for spec, name in zip(plan.outputs, plan.output_tensors, strict=True)}
