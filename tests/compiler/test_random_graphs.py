"""Random models against torch: through every pass, fused and placed in memory; run by numpy, and a few by kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import save_file

import npu_compiler
from npu_compiler.errors import UnsupportedOpError
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.compiler.random_graphs import Pair, RandomModel
from tests.support.reference_target import plan_ir
from tests.support.running import host_array

_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],
    "suppress_health_check": list(HealthCheck),
}


def _drawn(data: st.DataObject) -> tuple[RandomModel, list[Pair], dict[str, Any]]:
    """A model, its outputs and its IR."""
    model = RandomModel(data.draw)
    for _ in range(data.draw(st.integers(1, 2))):
        model.add_input()
    for _ in range(data.draw(st.integers(1, 8))):
        model.step()
    outputs = model.outputs()
    note("\n".join([*model.calls, f"outputs: {outputs}"]))
    return model, outputs, model.builder.build(*(output.value for output in outputs))


def _refused(error: UnsupportedOpError) -> None:
    """A change of memory that perhaps is another tensor's, which an IR does not say, is refused; nothing else is."""
    assume("the IR does not say whether" in error.reason)
    raise error


@given(data=st.data())
@settings(max_examples=150, **_SETTINGS)
def test_a_plan_computes_what_torch_computes(data: st.DataObject) -> None:
    model, outputs, ir = _drawn(data)
    try:
        planned = plan_ir(ir)
    except UnsupportedOpError as error:
        _refused(error)
    for result, (value, expected) in zip(planned.run(model.inputs, model.weights), outputs, strict=True):
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        np.testing.assert_allclose(result, expected.numpy(), rtol=1e-9, atol=1e-7 * scale, err_msg=value.name)


@pytest.fixture(scope="module")
def device() -> Device:
    return Device("software-metal")


@given(data=st.data())
@settings(max_examples=20, **_SETTINGS)
def test_kernels_compute_what_torch_computes(
    data: st.DataObject, device: Device, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In half precision, where a value beside a jump of the model may fall on its other side: most must agree."""
    model, outputs, ir = _drawn(data)
    try:
        results = _run(ir, model, device, tmp_path_factory.mktemp("weights"))
    except UnsupportedOpError as error:
        _refused(error)
    for value, expected in outputs:
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        if scale < torch.finfo(torch.float16).max / 2 and expected.numel():
            wrong = np.abs(results[value.name] - expected.numpy()) > 0.05 * scale
            assert wrong.mean() < 0.1, value.name


def _run(ir: dict[str, Any], model: RandomModel, device: Device, folder: Path) -> dict[str, NDArray[Any]]:
    program = npu_compiler.compile(ir, target=device.target)
    weights = None
    if program.recipes:
        save_file({name: tensor.float() for name, tensor in model.weights.items()}, folder / "w.safetensors")
        weights = load_weights(folder / "w.safetensors", program, device)
    inputs = {
        spec.name: NPUBuffer.from_numpy(host_array(model.inputs[spec.name], spec.host_dtype.numpy), device, spec=spec)
        for spec in program.input_specs
    }
    results = Executor(program, device).run(inputs, weights)
    return {spec.name: results[spec.name].to_numpy(spec=spec) for spec in program.output_specs}
