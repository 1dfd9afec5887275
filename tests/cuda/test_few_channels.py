"""Convolutions of few channels, whose pixels share 16 bytes: every step and dilation, with weights of a file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights

_OPTIONS: list[dict[str, Any]] = [
    {"stride": 1, "padding": 1},
    {"stride": 2, "padding": 1},
    {"stride": 2, "padding": 0},
    {"stride": 4, "padding": 1},
    {"stride": 3, "padding": 1},
    {"stride": (1, 2), "padding": (0, 1)},
    {"stride": (2, 1), "padding": (1, 0)},
    {"stride": 2, "dilation": 2},
    {"stride": 1, "dilation": (2, 1), "padding": 2},
]
every_option = pytest.mark.parametrize("options", _OPTIONS, ids=str)


def _compiled(channels: int, options: dict[str, Any]) -> tuple[torch.nn.Module, torch.Tensor, CompiledProgram]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv2d(channels, 24, 3, **options), torch.nn.ReLU()).eval()
    image = torch.randn(2, channels, 19, 21)
    ir = npu_compiler.extract(module, image, model_name="few_channels").ir
    return module, image, npu_compiler.compile(ir, target="cuda")


@every_option
@pytest.mark.parametrize("channels", [1, 3, 4, 5])
def test_gives_what_pytorch_gives(channels: int, options: dict[str, Any], device: Device) -> None:
    module, image, program = _compiled(channels, options)
    weights = load_weights({name: value.numpy() for name, value in module.state_dict().items()}, program, device)
    given = {program.input_specs[0].name: NPUBuffer.from_numpy(image.numpy(), device, spec=program.input_specs[0])}
    (output,) = Executor(program, device).run(given, weights).values()
    with torch.inference_mode():
        expected = module(image).numpy()
    np.testing.assert_allclose(output.to_numpy(spec=program.output_specs[0]), expected, atol=4e-3)


@every_option
def test_pixels_are_read_in_pairs_only_from_even_ones_on(options: dict[str, Any]) -> None:
    *_, program = _compiled(3, options)
    kernels = [program.main.kernels[call.kernel].entry for call in program.main.calls if isinstance(call, KernelCall)]
    paired = torch.nn.Conv2d(3, 24, 3, **options)
    assert ("conv2d_plain" in kernels) == (paired.stride[1] % 2 == 1 or paired.dilation[1] != 1)
