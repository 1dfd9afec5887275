"""Convolutions of few channels, whose pixels share 16 bytes: every step and dilation, with weights of a file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import npu_compiler
from cuda_compiler.images import image_packing
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.integers import ceil_div
from npu_runtime import Device, Executor, NPUBuffer, load_weights

_OPTIONS: list[dict[str, Any]] = [
    {"stride": 1, "padding": 1},
    {"stride": 2, "padding": 1},
    {"stride": 2, "padding": 0},
    {"stride": 3, "padding": 1},
    {"stride": (1, 2), "padding": (0, 1)},
    {"stride": (2, 1), "padding": (1, 0)},
    {"stride": 2, "dilation": 2},
    {"stride": 1, "dilation": (2, 1), "padding": 2},
    {"stride": 1, "dilation": 3, "padding": 2},
    {"stride": 1, "dilation": 2, "padding": 5},
    {"stride": 4, "padding": 3},
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
def test_pixels_are_read_in_pairs(options: dict[str, Any]) -> None:
    *_, program = _compiled(3, options)
    kernels = [program.main.kernels[call.kernel].entry for call in program.main.calls if isinstance(call, KernelCall)]
    assert kernels in (["pack_channels", "conv2d"], ["conv2d_window"])


@given(
    width=st.integers(1, 12),
    taps=st.integers(1, 6),
    step=st.integers(1, 5),
    dilation=st.integers(1, 4),
    pad=st.integers(0, 7),
)
def test_pairs_hold_what_the_taps_read(width: int, taps: int, step: int, dilation: int, pad: int) -> None:
    """A line of one channel, packed and walked as the kernels do, against a plain walk."""
    windows = max(0, (width + 2 * pad - dilation * (taps - 1) - 1) // step + 1)
    line, weight = np.arange(1.0, width + 1), np.arange(1.0, taps + 1) ** 2
    geometry = {"CHANNELS": 4, "WIDTH": width, "PAD_X": pad, "STEP_X": step, "DILATION_X": dilation}
    packing = image_packing._packing({**geometry, "TAPS_X": 2 * ceil_div(taps, 2), "PIXEL_STRIDE": 4})

    def pixel(x: int) -> float:
        return line[x] if 0 <= x < width else 0.0

    of_pixel = packing.channels // 4
    stored = [pixel(x - packing.first + i * packing.distance) for x in range(packing.width) for i in range(of_pixel)]
    walk = packing.geometry
    pairs = np.array([*stored, 0.0])[: len(stored) // 2 * 2].reshape(-1, 2)
    assert len(pairs) >= walk["WIDTH"]
    taps_of_pairs = np.pad(weight, (0, taps % 2)).reshape(-1, 2)
    for window in range(windows):
        places = window * walk["STEP_X"] - walk["PAD_X"] + np.arange(walk["TAPS_X"]) * walk["DILATION_X"]
        read = [pairs[x] if 0 <= x < walk["WIDTH"] else np.zeros(2) for x in places]
        expected = sum(weight[t] * pixel(window * step - pad + t * dilation) for t in range(taps))
        assert (np.array(read) * taps_of_pairs).sum() == expected
