"""Calls as people spell them: names for nodes, no device, arrays of any library."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import npu_compiler
from cuda_compiler import op_support as cuda_support
from metal_runtime.metal_api import software_metal
from npu_compiler import CompiledProgram, op_support
from npu_compiler.dtypes import FLOAT16
from npu_compiler.errors import InputError, TargetMismatchError, WeightError
from npu_runtime import (
    DAGExecutor,
    Device,
    DeviceBuffer,
    Executor,
    MetalBackend,
    NPUBuffer,
    load_weights,
)
from npu_runtime.cpu_fallback import execute_cpu_partition
from npu_runtime.host_tensors import as_array, like
from npu_runtime.profiler import Profiler
from npu_runtime.safetensors_file import SafetensorsFile
from tests.api.conftest import Made

TOLERANCE = 5e-3


class WithArray:
    def __init__(self, array: Any) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._array


class WithDLPack:
    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


FORMS: dict[str, Any] = {
    "numpy": lambda x: x,
    "float16": lambda x: x.astype(np.float16),
    "not contiguous": lambda x: np.asfortranarray(x),
    "torch": torch.from_numpy,
    "torch with a gradient": lambda x: torch.from_numpy(x).requires_grad_(),
    "torch's bfloat16": lambda x: torch.from_numpy(x).bfloat16(),
    "torch, not contiguous": lambda x: torch.from_numpy(np.asfortranarray(x)),
    "numpy's bfloat16": lambda x: x.astype(ml_dtypes.bfloat16),
    "__array__": WithArray,
    "DLPack": WithDLPack,
    "the buffer protocol": lambda x: memoryview(x),
}


# names of ops, and nodes


@pytest.mark.parametrize("name", ["aten.relu.default", "aten.relu_.default", "aten.add.Tensor", "aten.relu", "getitem"])
def test_the_name_of_an_op_is_supported_where_some_form_of_it_lowers(name: str) -> None:
    assert npu_compiler.is_op_supported(name)
    assert cuda_support.is_cuda_op_supported(name)


def test_the_name_of_an_op_that_is_not_supported_is_false_with_the_nearest() -> None:
    answer = npu_compiler.is_op_supported("aten.rely.default")
    assert not answer
    assert "aten.relu.default" in answer.reason
    assert not npu_compiler.is_op_supported("aten.special_i1e.default")


def test_supported_ops_can_be_asked_for_by_target() -> None:
    for names in (
        op_support.get_supported_ops(),
        op_support.get_supported_ops("cuda"),
        cuda_support.get_supported_ops(),
    ):
        assert "aten.relu.default" in names
        assert all(npu_compiler.is_op_supported(name) for name in names)


@pytest.mark.parametrize(
    "callback",
    [
        lambda op: op in {"aten.linear.default", "aten.relu.default"},
        lambda op: op in ["aten.linear.default", "aten.relu.default"],
        lambda op: op == "aten.linear.default" or op.startswith("aten.relu"),
        lambda op: bool(npu_compiler.is_op_supported(op)),
        lambda op: bool(op_support.is_op_supported(op, "cuda")),
        lambda op: op != "aten.special_i1e.default" and op.attrs.get("dim") is None,
        lambda node: "i1e" not in node.op_type and len(node.inputs) >= 1,
        lambda node: node["op_type"] != "aten.special_i1e.default" and node.outputs[0].shape == [2, 4],
        lambda node: node.get("op_type") != "aten.special_i1e.default" and node["inputs"][0]["dtype"] == "float32",
        lambda node: {"aten.linear.default": True, "aten.relu.default": True}.get(node, False),
    ],
)
def test_a_callback_gets_the_op_s_name_with_the_node_s_fields(callback: Any, made: Made) -> None:
    plan = npu_compiler.partition(_mixed_ir(), callback)
    assert [(part.device, len(part.nodes)) for part in plan.partitions] == [("npu", 2), ("cpu", 1)]


def test_a_callback_s_node_is_a_node_for_other_callbacks() -> None:
    seen: list[Any] = []

    def callback(op: Any) -> bool:
        seen.append(op)
        return False

    npu_compiler.partition(_mixed_ir(), callback)
    linear: Any = next(node for node in seen if node == "aten.linear.default")
    assert type(linear).__mro__[1] is str
    assert linear.to_dict()["name"] == linear.name
    assert npu_compiler.is_op_supported(linear.to_dict())


def _mixed_ir() -> dict[str, Any]:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.special.i1e(self.layer(x).relu())
            return result

    ir: dict[str, Any] = json.loads(json.dumps(npu_compiler.extract(Mixed().eval(), torch.zeros(2, 8)).ir))
    return ir


# devices


def test_three_lines_without_a_device(made: Made) -> None:
    program = npu_compiler.compile(made.folder / "small.json")
    weights = load_weights(made.folder / "small.safetensors", program)
    (result,) = Executor(program).run({"x": made.x}, weights).values()
    np.testing.assert_allclose(result.to_numpy(), made.expected, atol=TOLERANCE)


@pytest.mark.parametrize("form", ["name", "device", "backend"])
def test_a_device_may_be_a_name_or_a_backend(form: str, made: Made, device: Device) -> None:
    where: Any = {"name": "software-metal", "device": device, "backend": device.backend}[form]
    weights = load_weights(made.extraction.weights, made.program, where)
    (result,) = Executor(made.program, where).run({"x": made.x}, weights).values()
    buffer = NPUBuffer.from_numpy(made.x, where)
    dag = DAGExecutor(made.mixed, where)
    np.testing.assert_allclose(result.to_numpy(), made.expected, atol=TOLERANCE)
    assert buffer.device.backend is dag.device.backend is device.backend
    assert NPUBuffer.zeros((2,), where).device.target == "metal"


def test_a_new_backend_runs_a_program(made: Made) -> None:
    backend = MetalBackend(software_metal())
    executor = Executor(made.program, backend)
    (result,) = executor.run({"x": made.x}, load_weights(made.extraction.weights, made.program, backend)).values()
    assert result.device.backend is backend


def test_the_device_of_another_target_is_refused_with_both_remedies(made: Made, device: Device) -> None:
    program = npu_compiler.compile(made.extraction.ir, target="cuda")
    with pytest.raises(TargetMismatchError, match=r"target='metal'\).* or leave out the device"):
        Executor(program, device)


# arrays


def bent(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the CPU does to the product."""
    result: NDArray[np.float32] = torch.special.i1e(torch.from_numpy(values)).numpy()
    return result


@pytest.mark.parametrize("form", FORMS)
def test_inputs_of_any_library(form: str, made: Made, device: Device) -> None:
    given = FORMS[form](made.x)
    executor = Executor(made.program, device)
    weights = load_weights(made.extraction.weights, made.program, device)
    (result,) = executor.run({"x": given}, weights).values()
    np.testing.assert_allclose(result.to_numpy(), made.expected, atol=4 * TOLERANCE)
    dag = DAGExecutor(made.mixed, device)
    dag.load_weights(made.extraction.weights)
    (product,) = dag.execute({"x": given}).values()
    np.testing.assert_allclose(as_array(product), bent(made.expected), atol=8 * TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_any_library(form: str, made: Made, device: Device) -> None:
    weights = {name: FORMS[form](tensor.numpy()) for name, tensor in made.extraction.weights.items()}
    (result,) = Executor(made.program, device).run({"x": made.x}, load_weights(weights, made.program, device)).values()
    np.testing.assert_allclose(result.to_numpy(), made.expected, atol=4 * TOLERANCE)


def test_a_module_s_state_dict_is_weights(made: Made, device: Device) -> None:
    dag = DAGExecutor(made.mixed, device)
    dag.load_weights(made.module.state_dict())
    (product,) = dag.execute({"x": torch.from_numpy(made.x)}).values()
    np.testing.assert_allclose(as_array(product), bent(made.expected), atol=TOLERANCE)


def test_arrays_and_buffers_may_be_mixed_and_an_array_that_is_a_state_is_not_changed(device: Device) -> None:
    class Cache(torch.nn.Module):
        def forward(self, cache: torch.Tensor, at: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return cache.index_copy(0, at, x)

    inputs = {"cache": torch.zeros(64, 8), "at": torch.tensor([3]), "x": torch.ones(1, 8)}
    program = npu_compiler.compile(npu_compiler.extract(Cache().eval(), inputs).ir)
    assert program.main.state
    executor = Executor(program, device)
    cache = inputs["cache"].numpy()
    buffer = NPUBuffer.from_numpy(inputs["x"].numpy(), device, spec=program.input_specs[2])
    (result,) = executor.run({"cache": cache, "at": inputs["at"], "x": buffer}).values()
    assert not cache.any()
    assert result.to_numpy()[3].tolist() == [1.0] * 8
    Profiler(executor).run({"cache": cache, "at": inputs["at"], "x": buffer})


def test_a_tensor_s_memory_is_shared_with_its_array() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    as_array(tensor)[1] = 2
    assert tensor.tolist() == [0, 2, 0]
    assert like(as_array(tensor), tensor).dtype == torch.bfloat16


# memory


def test_a_dtype_for_the_device_and_one_for_the_host(device: Device) -> None:
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    buffer = NPUBuffer.from_numpy(x, device, dtype="bfloat16")
    assert (buffer.dtype.name, buffer.nbytes) == ("bfloat16", 12)
    assert buffer.to_numpy().dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(buffer.to_numpy(dtype="float32"), x.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.asarray(buffer).dtype == ml_dtypes.bfloat16
    assert NPUBuffer.from_numpy(np.arange(3), device, dtype="int32").to_numpy().tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="integers from 0 to 1099511627776"):
        NPUBuffer.from_numpy(np.array([0, 1 << 40]), device, dtype="int32")


def test_a_backend_makes_buffers_and_executors(made: Made, device: Device) -> None:
    backend = device.backend
    assert backend.device.backend is backend
    executor = backend.create_executor(made.program)
    assert isinstance(executor, Executor)
    zeros = backend.allocate_buffer((2, 8), "float32")
    assert not zeros.to_numpy().any()
    given = backend.allocate_buffer(made.x, spec=made.program.input_specs[0])
    (result,) = executor.run({"x": given}, load_weights(made.extraction.weights, made.program, backend)).values()
    np.testing.assert_allclose(result.to_numpy(), made.expected, atol=TOLERANCE)


def test_memory_is_read_as_bytes_as_elements_or_by_a_spec(made: Made, device: Device) -> None:
    spec = made.program.input_specs[0]
    memory = DeviceBuffer.from_numpy(made.x, device.backend, spec)
    half = made.x.astype(np.float16)
    assert spec.dtype == FLOAT16
    np.testing.assert_array_equal(memory.to_numpy(spec), half.astype(np.float32))
    np.testing.assert_array_equal(memory.to_numpy(spec, dtype="float16"), half)
    np.testing.assert_array_equal(memory.to_numpy(dtype="float16")[: half.size], half.ravel())
    assert memory.to_numpy().nbytes == memory.nbytes


# plans


def test_partitions_are_compiled_by_the_given_function(made: Made, device: Device) -> None:
    seen: list[str] = []

    def compile_part(ir: Any) -> CompiledProgram:
        seen.append(ir["model_name"])
        return npu_compiler.compile(ir)

    dag = DAGExecutor(made.mixed, device, compile_fn=compile_part)
    dag.load_weights(made.module.state_dict())
    (product,) = dag.execute({"x": made.x}).values()
    np.testing.assert_allclose(as_array(product), bent(made.expected), atol=TOLERANCE)
    assert seen == [part.ir["model_name"] for part in made.mixed.partitions if part.on_device]


def test_one_partition_runs_on_the_cpu(made: Made) -> None:
    (part,) = [part for part in made.mixed.partitions if not part.on_device]
    values = np.array([[1, 2, 3, 4], [2, 2, 2, 2]], np.float32)
    (result,) = execute_cpu_partition(part, {part.inputs[0]: values}).values()
    np.testing.assert_array_equal(result, bent(values))


def test_the_cpu_runs_a_partition_for_the_device_too(made: Made) -> None:
    part = npu_compiler.partition(made.extraction.ir, lambda op: False).partitions[0]
    (result,) = execute_cpu_partition(part, {"x": torch.from_numpy(made.x)}, made.module.state_dict()).values()
    np.testing.assert_allclose(result, made.expected, atol=1e-5)
    with pytest.raises(WeightError, match="2 are missing"):
        execute_cpu_partition(part, {"x": made.x})


# values


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16, np.float64])
def test_an_input_beyond_float16_is_refused_with_the_way_out(kind: Any, made: Made, device: Device) -> None:
    x = made.x.astype(kind)
    x[0, 0] = 1e5
    executor = Executor(made.program, device)
    weights = load_weights(made.extraction.weights, made.program, device)
    with pytest.raises(InputError, match=r"'x': given values up to .*float16 .* up to 65504; .* dtype='bfloat16'"):
        executor.run({"x": x}, weights)
    x[0, 0] = np.inf
    assert np.isinf(NPUBuffer.from_numpy(x, device, spec=made.program.input_specs[0]).to_numpy()[0, 0])
    program = npu_compiler.compile(made.extraction.ir, dtype="bfloat16")
    x[0, 0] = 1e5
    weights = load_weights(made.extraction.weights, program, device)
    (result,) = Executor(program, device).run({"x": x}, weights).values()
    assert np.isfinite(result.to_numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_that_are_no_numbers_are_refused_and_infinities_noted(
    dtype: torch.dtype, made: Made, device: Device
) -> None:
    weights = {name: tensor.to(dtype).clone() for name, tensor in made.extraction.weights.items()}
    assert load_weights(weights, made.program, device).notes == ()
    weights["layer.bias"][2] = float("-inf")
    assert load_weights(weights, made.program, device).notes == ("'layer.bias': 1 of 4 values are infinite",)
    weights["layer.weight"][1, 3] = float("nan")
    with pytest.raises(WeightError, match=r"'layer.weight': 1 of 32 values are NaN, the first at \(1, 3\)"):
        load_weights(weights, made.program, device)
    dag = DAGExecutor(npu_compiler.partition(made.extraction.ir, lambda op: False), device)
    with pytest.raises(WeightError, match="are NaN"):
        dag.load_weights(weights)


@pytest.mark.parametrize("change", ["truncated", "written over"])
def test_a_weight_file_that_changes_under_the_reader_is_an_error(change: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.ones(1 << 16), "b": torch.ones(1 << 16)}, path)
    file = SafetensorsFile(path)
    kept = file["a"]
    os.utime(path, ns=(1, 1))
    if change == "truncated":
        os.truncate(path, 4096)
    with pytest.raises(WeightError, match="it was changed while it was read; load the weights again"):
        file["b"]
    assert kept.sum() == 1 << 16


def test_a_file_that_is_truncated_after_loading_does_not_matter(made: Made, device: Device, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(dict(made.module.state_dict()), path)
    dag = DAGExecutor(npu_compiler.partition(made.extraction.ir, lambda op: False), device)
    dag.load_weights(path)
    os.truncate(path, 0)
    (result,) = dag.execute({"x": made.x}).values()
    np.testing.assert_allclose(as_array(result), made.expected, atol=1e-5)


def test_representations_are_short(made: Made) -> None:
    for value in (made.extraction, made.program, made.mixed):
        assert len(repr(value)) < 300
    assert "small.json" in repr(made.extraction)
    assert "for metal in float16" in repr(made.program)
