"""Two convolutions whose results are added, as where a residual network's shortcut changes its shape: one kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from cuda_runtime.nvrtc import architectures
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import MissingDependencyError
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.cuda.kernels import check_compile, kernels_for
from tests.cuda.resnets import compiled_resnet

# Channels and side of the first image and of the second, outputs, options of the two convolutions.
_CASES: list[tuple[int, int, int, int, int, dict[str, Any], dict[str, Any]]] = [
    (64, 14, 64, 14, 256, {"kernel_size": 1}, {"kernel_size": 1}),
    (64, 9, 128, 18, 72, {"kernel_size": 3, "padding": 1}, {"kernel_size": 1, "stride": 2}),
    (512, 7, 1024, 14, 2048, {"kernel_size": 1, "bias": False}, {"kernel_size": 1, "stride": 2}),
    (24, 11, 40, 23, 16, {"kernel_size": 3, "padding": 1}, {"kernel_size": 3, "stride": 2, "bias": False}),
    (128, 28, 64, 56, 128, {"kernel_size": 3, "padding": 1}, {"kernel_size": 1, "stride": 2}),
]


class _Sum(torch.nn.Module):
    def __init__(self, first: int, second: int, outputs: int, one: dict[str, Any], other: dict[str, Any]) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Conv2d(first, outputs, **one), torch.nn.Conv2d(second, outputs, **other)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.one(x) + self.other(y))


def _compiled(case: Any, batch: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor], CompiledProgram]:
    first, side, second, other_side, outputs, one, other = case
    torch.manual_seed(0)
    module = _Sum(first, second, outputs, one, other).eval()
    images = torch.randn(batch, first, side, side), torch.randn(batch, second, other_side, other_side)
    ir = npu_compiler.extract(module, images, model_name="added").ir
    return module, images, npu_compiler.compile(ir, target="cuda")


@pytest.mark.parametrize("case", _CASES, ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_gives_what_pytorch_gives(case: Any, batch: int, device: Device) -> None:
    module, images, program = _compiled(case, batch)
    weights = load_weights({name: value.numpy() for name, value in module.state_dict().items()}, program, device)
    given = {
        spec.name: NPUBuffer.from_numpy(image.numpy(), device, spec=spec)
        for spec, image in zip(program.input_specs, images, strict=True)
    }
    (output,) = Executor(program, device).run(given, weights).values()
    with torch.inference_mode():
        expected = module(*images).numpy()
    np.testing.assert_allclose(output.to_numpy(spec=program.output_specs[0]), expected, atol=1e-2)


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_is_one_kernel_that_compiles(case: Any) -> None:
    program = _compiled(case, 1)[2]
    assert len(program.main.calls) == 1
    try:
        known = architectures()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    for capability in {70, 80, 90} & set(known):
        check_compile(kernels_for(program.main, capability), capability)


@pytest.mark.parametrize(("name", "stages"), [("resnet18", 3), ("resnet50", 4)])
def test_shortcuts_of_residual_networks_are_computed_where_they_are_added(name: str, stages: int) -> None:
    convolutions = {"resnet18": 20, "resnet50": 53}[name]
    kernels = compiled_resnet(name, 1).main
    entries = [kernels.kernels[call.kernel].entry for call in kernels.calls if hasattr(call, "kernel")]
    assert sum(entry.startswith("conv2d") for entry in entries) == convolutions - stages
