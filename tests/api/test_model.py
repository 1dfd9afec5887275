"""`npu_runtime.load`: a model in few words."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import npu_compiler
import npu_runtime
from npu_compiler.errors import WeightError
from npu_runtime import Device, NPUBuffer
from tests.api.conftest import Made

TOLERANCE = 5e-3


def sources(made: Made) -> dict[str, tuple[Any, Any]]:
    """Everything that `load` takes: a model and its weights."""
    folder = made.folder
    return {
        "files": (folder / "small.npubin", folder / "small.safetensors"),
        "paths as text": (str(folder / "small.npubin"), str(folder / "small.safetensors")),
        "IR and a folder": (folder / "small.json", folder),
        "an IR as dict and a module's weights": (made.extraction.ir, made.module.state_dict()),
        "an extraction": (made.extraction, None),
        "a program": (made.program, made.extraction.weights),
        "a plan": (npu_compiler.partition(made.extraction.ir), made.extraction.weights),
        "a plan for the CPU alone": (npu_compiler.partition(made.extraction.ir, lambda op: False), folder),
    }


@pytest.mark.parametrize("source", range(8))
def test_a_model_is_called_with_arrays(source: int, made: Made, device: Device) -> None:
    model = npu_runtime.load(*list(sources(made).values())[source], device)
    assert [(spec.name, spec.shape, spec.dtype.name) for spec in model.inputs] == [("x", (2, 8), "float32")]
    assert [(spec.shape, spec.dtype.name) for spec in model.outputs] == [((2, 4), "float32")]
    for result in (model(made.x), model(x=made.x), model({"x": made.x})):
        assert isinstance(result, np.ndarray)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, made.expected, atol=TOLERANCE)
    assert "x: float32[2, 8]" in repr(model)


def test_the_best_device_is_taken_where_none_is_named(made: Made) -> None:
    assert npu_runtime.load(made.program, made.extraction.weights).device.target == "metal"
    assert npu_runtime.load(made.extraction).device.target == Device().target


def test_results_are_on_the_side_of_the_inputs(made: Made, device: Device) -> None:
    model = npu_runtime.load(made.program, made.extraction.weights, device)
    result = model(torch.from_numpy(made.x))
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.float32
    assert isinstance(model(made.x), np.ndarray)
    buffer = NPUBuffer.from_numpy(made.x, device, spec=made.program.input_specs[0])
    kept = model(buffer)
    assert isinstance(kept, NPUBuffer)
    np.testing.assert_allclose(kept.to_numpy(), made.expected, atol=TOLERANCE)


def test_bfloat16_stays_bfloat16(device: Device) -> None:
    module = torch.nn.Linear(8, 4).eval().bfloat16()
    model = npu_runtime.load(npu_compiler.extract(module, torch.zeros(2, 8, dtype=torch.bfloat16)), device=device)
    x = torch.randn(2, 8).bfloat16()
    result = model(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, module(x).detach(), rtol=2e-2, atol=2e-2)
    assert model(np.zeros((2, 8), ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("mixed", [False, True])
def test_a_state_that_is_a_buffer_stays_where_it_is(mixed: bool, device: Device) -> None:
    class Cache(torch.nn.Module):
        def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> dict[str, torch.Tensor]:
            updated = cache.index_copy(0, at, x @ x)
            out = updated @ x
            return {"out": torch.special.i0e(out) if mixed else out, "cache": updated}

    inputs = {"x": torch.rand(64, 64) / 8, "cache": torch.zeros(256, 64), "at": torch.arange(64)}
    extraction = npu_compiler.extract(Cache().eval(), inputs)
    source = extraction if mixed else npu_compiler.compile(extraction.ir)
    model = npu_runtime.load(source, device=device)
    buffer = NPUBuffer.zeros((256, 64), device)
    result = model(x=inputs["x"], cache=buffer, at=inputs["at"])
    assert isinstance(result["cache"], NPUBuffer)
    assert result["cache"].data is buffer.data
    assert isinstance(result["out"], torch.Tensor)
    expected = Cache()(**inputs)
    torch.testing.assert_close(result["out"], expected["out"], rtol=2e-2, atol=2e-1)
    again = model(**inputs)
    assert isinstance(again["cache"], torch.Tensor)
    torch.testing.assert_close(again["cache"], expected["cache"], rtol=2e-2, atol=2e-2)


def test_weights_of_another_model_are_refused(made: Made, device: Device) -> None:
    with pytest.raises(WeightError, match=r"'layer\.weight'"):
        npu_runtime.load(made.program, {"layer.bias": np.zeros(4, np.float32)}, device)
    with pytest.raises(WeightError, match=r"has 2 weights and none were given, .* load\(model, 'model.safetensors'\)"):
        npu_runtime.load(made.program, device=device)
