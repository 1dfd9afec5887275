"""Convolutions of codes of eight bits: exact sums, on tensor cores and without, whatever lies around an image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from benchmarks.coded_images import Coded, Rounded, with_codes
from npu_compiler.artifact.plan import CallChoice, KernelCall, options_of
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.cuda.kernels import check_plan_compiles
from tests.support.coded_convolution import exact_convolution


class Sizes(NamedTuple):
    """A convolution of an image [batch, channels, side, side + 3]."""

    channels: int
    outputs: int
    side: int
    taps: int
    batch: int = 2
    zero: int = 0
    stride: int = 1
    padding: int = 0
    dilation: int = 1


CASES = [
    Sizes(16, 8, 9, 3, padding=1),
    Sizes(32, 24, 11, 3, zero=-128, padding=1),
    Sizes(64, 64, 14, 1, zero=5),
    Sizes(48, 64, 13, 3, zero=-7, stride=2, padding=1),
    Sizes(128, 72, 7, 3, zero=127, padding=2, dilation=2),
    Sizes(512, 512, 7, 3, batch=1, zero=-128, padding=1),
    Sizes(256, 64, 28, 1, batch=8, zero=-128),
    Sizes(64, 256, 56, 1, batch=8, zero=-128),
    Sizes(128, 128, 28, 3, batch=8, zero=-3, padding=1),
    Sizes(64, 128, 9, 5, zero=-128, stride=2, padding=3),
]
each_case = pytest.mark.parametrize("sizes", CASES, ids=str)


class Model(torch.nn.Module):
    """A convolution of codes with what follows it; the image's scale is a power of two, so that nothing is rounded."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        torch.manual_seed(0)
        plain = torch.nn.Conv2d(sizes.channels, sizes.outputs, sizes.taps, sizes.stride, sizes.padding, sizes.dilation)
        self.rounded, self.coded = Rounded(0.0, 1.0), Coded(plain)
        self.rounded.scale, self.rounded.zero = 2.0**-6, sizes.zero

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.relu(self.coded(self.rounded(x)) + 0.25)
        return made


class Requantised(torch.nn.Module):
    """A convolution of codes whose sums become codes, with a shortcut or without, which a second one reads as they are.

    Scales are powers of two, so that nothing but codes is rounded, and often from halfway between two.
    """

    def __init__(self, sizes: Sizes, zero: int, has_shortcut: bool) -> None:
        super().__init__()
        first = Model(sizes)
        self.rounded, self.coded, self.has_shortcut = first.rounded, first.coded, has_shortcut
        self.coded.scales.fill_(2.0**-8)
        self.coded.bias = torch.nn.Parameter((self.coded.bias * 2**8).round() / 2**8)
        self.summed, self.made = Rounded(0.0, 1.0), Rounded(0.0, 1.0)
        (self.summed.scale, self.summed.zero), (self.made.scale, self.made.zero) = (2.0**-3, zero), (2.0**-2, -128)
        outputs = sizes.outputs
        self.same = Coded(torch.nn.Conv2d(outputs, outputs, 1, bias=False))
        self.same.codes.copy_(torch.eye(outputs).reshape(outputs, outputs, 1, 1))
        self.same.scales.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rounded(x)
        made = self.coded(x)
        if self.has_shortcut:
            made = self.summed(made) + x
        numbers: torch.Tensor = self.same(self.made(torch.relu(made)))
        return numbers


def _image(sizes: Sizes) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-128, 128, (sizes.batch, sizes.channels, sizes.side, sizes.side + 3), generator=generator)
    return (codes - sizes.zero) * 2.0**-6


def _compiled(model: torch.nn.Module, image: torch.Tensor) -> tuple[CompiledProgram, Any]:
    extraction = npu_compiler.extract(model.eval(), (image,))
    return npu_compiler.compile(extraction, target="cuda"), extraction.weights


def _each_option(program: CompiledProgram) -> Iterator[CompiledProgram]:
    """The program with one option of its choices after the other."""
    steps = program.main.steps
    count = max(len(options_of(step)) for step in steps)
    for number in range(count):
        chosen = [
            call
            for step in steps
            for call in (
                options_of(step)[min(number, len(options_of(step)) - 1)].calls
                if isinstance(step, CallChoice)
                else (step,)
            )
        ]
        plan = replace(program.main, steps=tuple(chosen))
        yield replace(program, functions={"main": plan})


def _results(model: torch.nn.Module, image: torch.Tensor, device: Device) -> Iterator[NDArray[np.float64]]:
    """What a model gives on the device, then with each option of its choices."""
    program, weights = _compiled(model, image)
    for way in [program, *_each_option(program)]:
        loaded = load_weights(weights, way, device)
        given = {way.input_specs[0].name: NPUBuffer.from_numpy(image.numpy(), device, spec=way.input_specs[0])}
        (output,) = Executor(way, device).run(given, loaded).values()
        yield output.to_numpy(spec=way.output_specs[0]).astype(np.float64)


@each_case
def test_sums_are_exact(sizes: Sizes, device: Device) -> None:
    model, image = Model(sizes), _image(sizes)
    expected = torch.relu(exact_convolution(model.coded, image) + 0.25).numpy()
    for result in _results(model, image, device):
        np.testing.assert_allclose(result, expected, rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize("sizes", [sizes for sizes in CASES if sizes.outputs % 16 == 0], ids=str)
def test_sums_become_codes(sizes: Sizes, device: Device) -> None:
    model, image = Requantised(sizes, 0, False), _image(sizes)
    with torch.no_grad():
        expected = model(image).numpy()
    for result in _results(model, image, device):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("zero", [0, -6, 5, -128, 127])
@pytest.mark.parametrize("channels", [64, 256])
def test_shortcuts_are_added_to_codes(channels: int, zero: int, device: Device) -> None:
    sizes = Sizes(channels, channels, 14, 1, batch=8, zero=-zero - 1)
    model, image = Requantised(sizes, zero, True), _image(sizes)
    with torch.no_grad():
        expected = model(image).numpy()
    for result in _results(model, image, device):
        np.testing.assert_array_equal(result, expected)


class Pooled(torch.nn.Module):
    """A convolution of an image of few channels, whose maxima become codes."""

    def __init__(self, has_relu: bool) -> None:
        super().__init__()
        last = Requantised(Sizes(16, 64, 8, 1), 0, False)
        self.rounded, self.made, self.same = last.rounded, last.made, last.same
        self.coded = Coded(torch.nn.Conv2d(3, 64, 7, 2, 3, bias=False))
        self.coded.scales.fill_(2.0**-8)
        self.made.zero = -128 if has_relu else 3
        self.has_relu = has_relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.coded(self.rounded(x))
        x = torch.nn.functional.max_pool2d(torch.relu(x) if self.has_relu else x, 3, 2, 1)
        made: torch.Tensor = self.same(self.made(x))
        return made


@pytest.mark.parametrize("has_relu", [True, False])
@pytest.mark.parametrize("side", [37, 64])
def test_maxima_are_those_of_codes(side: int, has_relu: bool, device: Device) -> None:
    model, image = Pooled(has_relu), _image(Sizes(3, 64, side, 7)).clamp(-0.5, 0.5)
    with torch.no_grad():
        expected = model(image).numpy()
    for result in _results(model, image, device):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("architecture", [75, 80, 90])
def test_kernels_of_maxima_compile(architecture: int) -> None:
    program, _ = _compiled(Pooled(True), _image(Sizes(3, 64, 37, 7)))
    check_plan_compiles(program.main, architecture)


@pytest.mark.parametrize("architecture", [70, 75, 80, 90])
def test_kernels_compile(architecture: int) -> None:
    sizes = CASES[(architecture - 70) // 5 * 2 + 1]
    program, _ = _compiled(Model(sizes), _image(sizes))
    check_plan_compiles(program.main, architecture)


def test_a_network_goes_from_codes_to_codes() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 16, 1), torch.nn.ReLU()]
    network, image = torch.nn.Sequential(*layers, torch.nn.Conv2d(16, 8, 3)).eval(), torch.randn(2, 16, 12, 12)
    program, _ = _compiled(with_codes(network, image), image)
    calls = [call for call in program.main.calls if isinstance(call, KernelCall)]
    assert [program.main.kernels[call.kernel].entry for call in calls] == ["elementwise", "conv2d", "conv2d", "conv2d"]
    assert all("CodePair" in program.main.kernels[call.kernel].text for call in calls[1:])
