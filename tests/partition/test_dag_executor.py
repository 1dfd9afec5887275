"""Mixed execution: what crosses between host and device, what stays, and what a caller may get wrong."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from metal_runtime import MetalBackend
from npu_compiler import extract, partition
from npu_compiler.errors import (
    InputError,
    MissingDependencyError,
    TargetMismatchError,
    UnsupportedOpError,
    WeightError,
)
from npu_compiler.frontend.extraction import Extraction
from npu_runtime import DAGExecutor, Device, NPUBuffer
from tests.partition.mixed import array, arrays_of, check_equal, check_mixed, sides
from tests.support.extraction import Function

ROWS, SIZE = 8, 32


class TwoLayers(nn.Module):
    """A linear layer on the device, a cumulative sum on the CPU, the same layer again; `bias` is the CPU's alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(SIZE, SIZE)
        self.bias = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = torch.special.i0e(self.layer(x) + torch.special.i0e(self.bias)) / ROWS
        return torch.tanh(self.layer(middle)) @ self.layer.weight


X = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(1))
SQUARE = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(2)) * 0.2


@pytest.fixture(scope="module")
def extraction(tmp_path_factory: pytest.TempPathFactory) -> Extraction:
    return extract(TwoLayers().eval(), (X,), tmp_path_factory.mktemp("layers") / "layers.json")


@pytest.fixture
def loaded(extraction: Extraction, device: Device) -> DAGExecutor:
    executor = DAGExecutor(partition(extraction.ir), device)
    executor.load_weights(arrays_of(extraction.weights))
    return executor


def test_a_backend_is_enough(extraction: Extraction) -> None:
    executor = DAGExecutor(partition(extraction.ir), MetalBackend())
    executor.load_weights(arrays_of(extraction.weights))
    (result,) = executor.execute({"x": X.numpy()}).values()
    with torch.no_grad():
        check_equal("result", array(result), TwoLayers()(X), 5e-3)


def test_weights_from_a_file(extraction: Extraction, device: Device, loaded: DAGExecutor) -> None:
    assert extraction.weights_path is not None
    executor = DAGExecutor(partition(extraction.ir), device)
    executor.load_weights(extraction.weights_path)
    (result,) = executor.execute({"x": X.numpy()}).values()
    (expected,) = loaded.execute({"x": X.numpy()}).values()
    np.testing.assert_array_equal(array(result), array(expected))


def test_weights_are_where_they_are_read_and_once(extraction: Extraction, device: Device) -> None:
    executor = DAGExecutor(partition(extraction.ir), device)
    assert sides(executor.plan) == ["cpu", "npu", "cpu", "npu"]
    before = device.backend.transfers.uploads.nbytes
    executor.load_weights(arrays_of(extraction.weights))
    uploaded = device.backend.transfers.uploads.nbytes - before
    assert uploaded == 2 * (SIZE * SIZE + SIZE)  # weight and bias in float16; what is made of the bias stays on the CPU
    before = device.backend.transfers.uploads.nbytes
    executor.execute({"x": X.numpy()})
    crossing = sum(t.nbytes for t in executor.plan.transfers if t.direction == "to_npu")
    assert device.backend.transfers.uploads.nbytes - before == crossing


@pytest.mark.parametrize(("size", "uploads"), [(96, 2), (64, 3)])
def test_tensors_stay_on_the_device_between_its_partitions(size: int, uploads: int, device: Device) -> None:
    """A tensor that several partitions read crosses once; a small one with each of them, in its own submission."""

    def function(x: torch.Tensor) -> torch.Tensor:
        kept = x @ x
        result: torch.Tensor = (torch.special.i0e(kept) @ x) + kept
        return result

    square = torch.randn(size, size) / size**0.5
    plan = check_mixed(Function(function), (square,), device)
    assert sides(plan) == ["npu", "cpu", "npu"]
    to_device = [t.tensor for t in plan.transfers if t.direction == "to_npu"]
    assert to_device == [plan.inputs[0].name, "special_i0e"]
    executor = DAGExecutor(plan, device)
    before = device.backend.transfers.uploads.count
    executor.execute({plan.inputs[0].name: square.numpy()})
    assert device.backend.transfers.uploads.count - before == uploads


def test_bfloat16_crosses_bit_for_bit(device: Device) -> None:
    """All 65,536 values go to the device, back, through the CPU and to the device again."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        on_device = ((x * 1.0) * 1.0 * 1.0) * 1.0
        on_cpu = torch.roll(on_device, 1, 0)
        return ((on_cpu * 1.0) * 1.0 * 1.0) * 1.0, on_device

    bits = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    values = bits[np.isfinite(bits.astype(np.float32))]
    values = values[(np.abs(values.astype(np.float32)) >= 2.0**-126) | (values == 0)]  # devices may flush subnormals
    extraction = extract(Function(function), (torch.zeros(values.shape, dtype=torch.bfloat16),))
    plan = partition(extraction.ir, lambda node: "roll" not in node.op_type)
    assert sides(plan) == ["npu", "cpu", "npu"]
    results = [array(value) for value in DAGExecutor(plan, device).execute({plan.inputs[0].name: values}).values()]
    assert all(result.dtype == ml_dtypes.bfloat16 for result in results)
    np.testing.assert_array_equal(results[0].view(np.uint16), np.roll(values, 1).view(np.uint16))
    np.testing.assert_array_equal(results[1].view(np.uint16), values.view(np.uint16))


def test_the_cpu_computes_in_the_model_s_dtype(device: Device) -> None:
    """2048 + 1 is not representable in float16: a float16 cumulative sum would stand still."""
    x = torch.zeros(4099, 16)
    extraction = extract(Function(lambda a, b: torch.cumsum((a @ b) * 0 + 1, 0) - 4096), (x, torch.zeros(16, 4)))
    plan = partition(extraction.ir, lambda node: node.op_type != "aten.cumsum.default" and "sub" not in node.op_type)
    names = [spec.name for spec in plan.inputs]
    executor = DAGExecutor(plan, device)
    (result,) = executor.execute({names[0]: x.numpy(), names[1]: np.zeros((16, 4), np.float32)}).values()
    assert array(result)[-1].tolist() == [3, 3, 3, 3]


def test_a_mask_made_on_the_cpu_becomes_infinite_without_a_word(device: Device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        mask = torch.full((SIZE, SIZE), torch.finfo(torch.float32).min).triu(1)
        return torch.softmax(x @ x + torch.roll(mask, 1, 1).roll(-1, 1), -1)

    plan = check_mixed(
        Function(function), (SQUARE,), device, is_op_supported=lambda node: node.op_type != "aten.roll.default"
    )
    assert "cpu" in sides(plan)


def test_an_input_too_large_for_the_device_is_told(device: Device) -> None:
    plan = partition(extract(Function(lambda x: torch.special.i0e(x @ x)), (SQUARE,)).ir)
    with pytest.raises(InputError, match=r"values up to .*float16 on the device holds up to 65504; .*'bfloat16'"):
        DAGExecutor(plan, device).execute({plan.inputs[0].name: SQUARE.numpy() * 1e6})


def test_inputs_of_any_floating_point_type(loaded: DAGExecutor) -> None:
    (expected,) = loaded.execute({"x": X.half().float().numpy()}).values()
    for kind in (np.float16, np.float64):
        (result,) = loaded.execute({"x": X.half().numpy().astype(kind)}).values()
        np.testing.assert_allclose(array(result), array(expected), atol=1e-3)


def test_inputs_that_are_read_only_or_strided(loaded: DAGExecutor) -> None:
    (expected,) = loaded.execute({"x": X.numpy()}).values()
    strided = np.asfortranarray(X.numpy())
    strided.flags.writeable = False
    (result,) = loaded.execute({"x": strided}).values()
    np.testing.assert_array_equal(array(result), array(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.clear(), "given the inputs none, expected 'x'; missing: 'x'"),
        (lambda given: given.update(y=given["x"]), "not expected: 'y'"),
        (lambda given: given.update(x=X.numpy()[:4]), r"given the shape \(4, 32\), expected \(8, 32\)"),
        (lambda given: given.update(x=X.numpy().astype(np.int32)), r"given the dtype int32, expected float32"),
        (lambda given: given.update(x=X.tolist()), "given a list, expected an array, a tensor or an NPUBuffer"),
    ],
)
def test_wrong_inputs(change: Any, message: str, loaded: DAGExecutor) -> None:
    given: dict[str, Any] = {"x": X.numpy()}
    change(given)
    with pytest.raises(InputError, match=message):
        loaded.execute(given)


def test_wrong_weights(extraction: Extraction, device: Device) -> None:
    executor = DAGExecutor(partition(extraction.ir), device)
    with pytest.raises(WeightError, match="has 3 weights and none were loaded; call load_weights"):
        executor.execute({"x": X.numpy()})
    weights = arrays_of(extraction.weights)
    for name in ("bias", "layer.weight"):
        with pytest.raises(WeightError, match=f"1 are missing:\n  '{name}'"):
            executor.load_weights({key: value for key, value in weights.items() if key != name})
        with pytest.raises(WeightError, match=f"'{name}': given shape"):
            executor.load_weights(weights | {name: np.zeros((2, 2), np.float32)})
        with pytest.raises(WeightError, match=f"'{name}': given dtype int64, expected float"):
            executor.load_weights(weights | {name: weights[name].astype(np.int64)})
    executor.load_weights({name: value.astype(np.float64) for name, value in weights.items()})
    executor.execute({"x": X.numpy()})


def test_a_plan_for_another_target(extraction: Extraction) -> None:
    class Other(MetalBackend):
        target = "other"

    with pytest.raises(TargetMismatchError, match=r"was partitioned for the target 'metal', .* partition it again"):
        DAGExecutor(partition(extraction.ir), Other())
    with pytest.raises(InputError, match="given a int, expected a backend or a Device"):
        DAGExecutor(partition(extraction.ir), 7)  # type: ignore[arg-type]


def test_a_callback_that_promises_too_much(device: Device) -> None:
    plan = partition(extract(Function(lambda x: torch.special.i0e(x)), (X,)).ir, lambda node: True)
    with pytest.raises(UnsupportedOpError, match="node 'special_i0e'"):
        DAGExecutor(plan, device)


def test_without_torch(extraction: Extraction, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("npu_runtime.dag_executor.find_spec", lambda name: None)
    with pytest.raises(
        MissingDependencyError, match=r"needs the package 'torch'.* pip install 'npu-compiler\[torch\]'"
    ):
        DAGExecutor(partition(extraction.ir), device)


def test_a_plan_for_the_device_alone_needs_no_torch(tmp_path: Path) -> None:
    extract(Function(lambda x: torch.relu(x @ x)), (SQUARE,), tmp_path / "relu.json")
    program = (
        "import sys, numpy as np\n"
        "from npu_compiler import partition\n"
        "from npu_runtime import DAGExecutor, Device\n"
        f"plan = partition({str(tmp_path / 'relu.json')!r})\n"
        "executor = DAGExecutor(plan, Device('software-metal'))\n"
        f"results = executor.execute({{plan.inputs[0].name: np.ones(({SIZE}, {SIZE}), np.float32)}})\n"
        f"assert (results['relu'] == {SIZE}).all()\n"
        "assert 'torch' not in sys.modules and 'torch_ir' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)


def test_a_buffer_that_only_the_cpu_reads(device: Device) -> None:
    plan = partition(extract(Function(lambda x: torch.special.i0e(x)), (X,)).ir)
    buffer = NPUBuffer.from_numpy(X.half().numpy(), device)
    (result,) = DAGExecutor(plan, device).execute({plan.inputs[0].name: buffer}).values()
    check_equal("result", array(result), torch.special.i0e(X.half().float()), 1e-6)


def test_runs_from_several_threads(loaded: DAGExecutor) -> None:
    def run(factor: int) -> NDArray[Any]:
        return array(loaded.execute({"x": X.numpy() * factor})["matmul"])

    expected = [run(factor) for factor in range(6)]
    with ThreadPoolExecutor(3) as pool:
        for result, wanted in zip(pool.map(run, range(6)), expected, strict=True):
            np.testing.assert_array_equal(result, wanted)


def test_a_tensor_that_goes_by_keyword_alone_is_read(device: Device) -> None:
    def function(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(x, values, sorter=torch.argsort(x)) * 2

    plan = check_mixed(Function(function), (torch.tensor([3.0, 1.0, 2.0, 5.0]), torch.tensor([0.5, 2.5, 9.0])), device)
    assert "cpu" in sides(plan)
