"""Convolutions of codes, as graphs have them and as the rule leaves them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from benchmarks.coded_images import Coded, Rounded, with_codes
from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.graph.graph_optimizer import optimize
from npu_runtime import Device, load
from tests.support.coded_convolution import exact_convolution
from tests.support.reference_target import Planned, plan_ir


class Coding(torch.nn.Module):
    """A convolution whose image and filter are codes, with zero points."""

    def __init__(self, zero: int, weight_zero: int = 0, bias: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rounded, self.coded = Rounded(0.0, 1.0), Coded(torch.nn.Conv2d(5, 6, 3, bias=bias, **options))
        self.rounded.scale, self.rounded.zero = 2.0**-5, zero
        if weight_zero:
            self.coded.codes //= 2
            self.coded.zeros += weight_zero

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.coded(self.rounded(x))
        return made


def _planned(model: torch.nn.Module, image: torch.Tensor) -> tuple[Planned, Any]:
    extraction = npu_compiler.extract(model.eval(), (image,))
    weights = {name: torch.as_tensor(value) for name, value in extraction.weights.items()}
    return plan_ir(extraction.ir), weights


def _image(zero: int) -> torch.Tensor:
    return (torch.randint(-128, 128, (2, 5, 9, 8), generator=torch.Generator().manual_seed(4)) - zero) * 2.0**-5


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        (0, {"padding": 1}),
        (-128, {"padding": 2, "dilation": 2}),
        (127, {"stride": 2, "padding": 1}),
        (5, {"padding": "same"}),
        (-3, {"bias": False}),
        (9, {"weight_zero": 7, "padding": 1}),
    ],
)
def test_codes_are_convolved_as_they_are(zero: int, options: dict[str, Any]) -> None:
    model, image = Coding(zero, **options), _image(zero)
    planned, weights = _planned(model, image)
    assert any(group.problem is not None and group.problem.operands[0].dtype.size == 1 for group in planned.groups)
    (result,) = planned.run({planned.plan.inputs[0].name: image}, weights)
    np.testing.assert_allclose(result, exact_convolution(model.coded, image).numpy(), rtol=2**-9, atol=2**-9)


def test_codes_that_do_not_fit_without_their_zero_points_give_no_numbers() -> None:
    model, image = Coding(0), _image(0)
    model.coded.zeros[2] = -100
    planned, weights = _planned(model, image)
    (result,) = planned.run({planned.plan.inputs[0].name: image}, weights)
    assert np.isnan(result[:, 2]).all()
    assert not np.isnan(np.delete(result, 2, 1)).any()


def test_filters_of_codes_that_no_kernel_loads_become_numbers_once() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU()).eval()
    image = torch.randn(1, 3, 8, 8)
    extraction = npu_compiler.extract(with_codes(network, image), (image,))
    plan = npu_compiler.compile(extraction, target="metal").main
    assert not any("quantize_per_channel" in call.label for call in plan.calls)


def test_a_network_of_numbers_has_no_codes() -> None:
    network, image = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3), torch.nn.ReLU()).eval(), torch.randn(1, 16, 8, 8)
    graph = read_graph(npu_compiler.extract(network, (image,)).ir)
    assert optimize(graph, multiplies_codes=lambda image, weight, groups: True).nodes == optimize(graph).nodes


class Shortcut(torch.nn.Module):
    """A convolution of codes to which its own image is added, and a convolution that reads what becomes codes of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.behind = Coding(-3, padding=1), Coded(torch.nn.Conv2d(6, 4, 1))
        self.inner.coded = Coded(torch.nn.Conv2d(6, 6, 3, padding=1))
        self.made = Rounded(0.0, 1.0)
        self.made.scale, self.made.zero = 2.0**-4, -128

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner.rounded(x)
        made: torch.Tensor = self.behind(self.made(torch.relu(self.inner.coded(x) + x)))
        return made


def test_what_an_epilogue_reads_too_is_stored() -> None:
    """The codes of the image are an operand of the convolution and of what follows it."""
    model = Shortcut()
    image = (torch.randint(-128, 128, (2, 6, 9, 8), generator=torch.Generator().manual_seed(6)) + 3) * 2.0**-5
    planned, weights = _planned(model, image)
    (result,) = planned.run({planned.plan.inputs[0].name: image}, weights)
    with torch.no_grad():
        expected = model(image).numpy()
    assert np.mean(np.abs(result - expected) > 2**-8 * np.abs(expected) + 2**-8) < 0.01


def test_codes_from_zero_are_unsigned() -> None:
    """Those of what a ReLU gives, but neither an output nor codes whose zero is another."""
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 1)).eval()
    image = torch.randn(1, 3, 8, 8)
    graph = read_graph(npu_compiler.extract(with_codes(network, image), (image,)).ir)
    made = optimize(graph, multiplies_codes=lambda image, weight, groups: groups == 1)
    kinds = [made.tensors[node.outputs[0]].dtype.name for node in made.nodes if ".quantize_per_tensor" in node.op]
    assert kinds == ["int8", "uint8"]
    convolutions = [node for node in made.nodes if ".coded_convolution" in node.op]
    assert [node.attrs["outside"] == 0 for node in convolutions] == [False, True]


def _pooled(has_relu: bool) -> tuple[torch.nn.Module, torch.Tensor]:
    """A network of codes whose maxima become codes, and an image."""
    torch.manual_seed(7)
    layers = [torch.nn.ReLU()] if has_relu else []
    pooling = torch.nn.MaxPool2d(3, 2, 1)
    network = torch.nn.Sequential(torch.nn.Conv2d(5, 16, 3), *layers, pooling, torch.nn.Conv2d(16, 8, 1)).eval()
    image = torch.randn(2, 5, 12, 11)
    return with_codes(network, image), image


@pytest.mark.parametrize(("has_relu", "kind"), [(True, "uint8"), (False, "int8")])
def test_what_is_pooled_is_codes(has_relu: bool, kind: str) -> None:
    coded, image = _pooled(has_relu)
    planned, weights = _planned(coded, image)
    (group,) = (group for group in planned.groups if group.problem is not None and group.problem.kind == "pool2d")
    assert group.problem is not None
    assert group.problem.operands[0].dtype.name == group.output.dtype.name == kind
    (result,) = planned.run({planned.plan.inputs[0].name: image}, weights)
    with torch.no_grad():
        np.testing.assert_allclose(result, coded(image).numpy(), rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("has_relu", [True, False])
def test_maxima_of_codes_on_a_device(has_relu: bool, device: Device) -> None:
    coded, image = _pooled(has_relu)
    extraction = npu_compiler.extract(coded.eval(), (image,))
    program = npu_compiler.compile(extraction.ir, device.target)
    result = load(program, extraction.weights, device)(image)
    with torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(result), coded(image), rtol=2**-7, atol=2**-5)
