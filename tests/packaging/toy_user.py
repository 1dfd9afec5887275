"""What a user of a target from elsewhere types, in an interpreter of its own; `test_toy_target` runs it.

``python toy_user.py FOLDER``: the files go there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
import npu_runtime
from npu_cli.main import main
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import DeviceError, TargetMismatchError, UnsupportedOpError
from npu_runtime import DAGExecutor, Device, Executor, NPUBuffer, load_weights
from npu_runtime.profiler import Profiler


class Likelihoods(torch.nn.Module):
    """A classifier whose scores become logarithms of probabilities, which no target computes so."""

    def __init__(self, layers: torch.nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> Any:
        return torch.special.log_ndtr(self.layers(x))


def check(result: Any, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(result.astype(np.float64), expected.double().numpy(), rtol=5e-3, atol=5e-3)


def classifier() -> torch.nn.Sequential:
    torch.manual_seed(0)
    nn = torch.nn
    head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 7 * 7, 64), nn.LayerNorm(64), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), *head).eval()


def run_whole(model: torch.nn.Module, x: torch.Tensor, folder: Path) -> None:
    ir = folder / "tiny.json"
    npu_compiler.extract(model, x, ir, model_name="tiny")
    npu_compiler.compile(ir, target="toy").save(folder / "tiny.npubin")
    program = CompiledProgram.load(folder / "tiny.npubin")
    device = Device("toy")
    weights = load_weights(folder / "tiny.safetensors", program, device)
    executor = Executor(program, device)
    (source,), (result,) = program.input_specs, program.output_specs
    given = {source.name: NPUBuffer.from_numpy(x.numpy(), device, spec=source)}
    outputs = executor.run(given, weights)
    check(outputs[result.name].to_numpy(spec=result), model(x))
    check(npu_runtime.load(folder / "tiny.npubin", folder / "tiny.safetensors")(x.numpy()), model(x))
    assert npu_compiler.compile(ir, target="toy").to_bytes() == program.to_bytes()
    assert "toy" in program.describe()
    Profiler(executor).run(inputs=given, weights=weights)
    with pytest.raises(TargetMismatchError, match="--target toy"):
        Executor(npu_compiler.compile(ir, target="metal"), device)
    with pytest.raises(DeviceError, match="there is one toy device"):
        Device("toy:1")


def run_divided(layers: torch.nn.Sequential, x: torch.Tensor) -> None:
    model = Likelihoods(layers).eval()
    extraction = npu_compiler.extract(model, x)
    with pytest.raises(UnsupportedOpError, match="log_ndtr"):
        npu_compiler.compile(extraction.ir, target="toy")
    plan = npu_compiler.partition(extraction.ir, target="toy")
    assert {part.device for part in plan.partitions} == {"npu", "cpu"}
    dag = DAGExecutor(plan, Device("toy"))
    dag.load_weights(extraction.weights)
    results = dag.execute(inputs={plan.inputs[0].name: x.numpy()})
    check(next(iter(results.values())), model(x))


def run_commands(folder: Path) -> None:
    ir, program, weights = (str(folder / f"tiny.{suffix}") for suffix in ("json", "npubin", "safetensors"))
    assert main(["compile", ir, "--target", "toy", "-o", program]) == 0
    assert main(["describe", program]) == 0
    assert main(["run", program, "--weights", weights, "--input", f"input={folder / 'x.npy'}", "--device", "toy"]) == 0
    assert main(["partition", ir, "--target", "toy"]) == 0
    main(["doctor"])


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    place, layers, image = Path(sys.argv[1]), classifier(), torch.rand(1, 3, 31, 31)
    run_whole(layers, image, place)
    run_divided(layers, image)
    np.save(place / "x.npy", image.numpy())
    run_commands(place)
