"""Convolutions on the Metal kernels, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_compiler import CompiledProgram, compile
from npu_compiler.errors import UnsupportedOpError
from tests.metal.graphs import Graph, Node
from tests.support.ir_builder import IRBuilder

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat"])


def convolve(
    graph: Graph, image: tuple[int, ...], outputs: int, kernel: tuple[int, int], bias: bool = True, **attrs: Any
) -> Node:
    groups = attrs.get("groups", 1)
    weight = graph.weight(outputs, image[1] // groups, *kernel)
    arguments = [attrs.get(name, default) for name, default in DEFAULTS]
    return graph.call("conv2d", graph.input(*image), weight, graph.weight(outputs) if bias else None, *arguments)


DEFAULTS = (("stride", [1, 1]), ("padding", [0, 0]), ("dilation", [1, 1]), ("groups", 1))

SHAPES: dict[str, tuple[tuple[int, ...], int, tuple[int, int], dict[str, Any]]] = {
    "pointwise": ((1, 64, 7, 7), 64, (1, 1), {}),
    "3x3": ((1, 64, 9, 10), 96, (3, 3), {"padding": [1, 1]}),
    "3x3 with stride": ((1, 32, 15, 14), 40, (3, 3), {"stride": [2, 2], "padding": [1, 1]}),
    "stem": ((1, 3, 31, 29), 64, (7, 7), {"stride": [2, 2], "padding": [3, 3]}),
    "one channel to one": ((1, 1, 8, 8), 1, (3, 3), {}),
    "few channels": ((1, 5, 8, 9), 7, (2, 3), {"padding": [1, 0]}),
    "24 channels": ((1, 24, 10, 10), 20, (3, 3), {"padding": [1, 1]}),
    "batch": ((3, 16, 7, 7), 24, (3, 3), {"padding": [1, 1]}),
    "dilated": ((1, 16, 13, 12), 16, (3, 3), {"dilation": [2, 3], "padding": [2, 3]}),
    "uneven": ((2, 8, 12, 9), 8, (5, 2), {"stride": [3, 1], "padding": [4, 1], "dilation": [1, 2]}),
    "whole image": ((1, 16, 6, 6), 32, (6, 6), {}),
    "two groups": ((1, 64, 8, 8), 96, (3, 3), {"groups": 2, "padding": [1, 1]}),
    "odd groups": ((2, 15, 6, 7), 51, (3, 3), {"groups": 3}),
    "many groups": ((1, 32, 8, 8), 64, (3, 3), {"groups": 8, "padding": [1, 1]}),
    "depthwise": ((2, 40, 9, 8), 40, (3, 3), {"groups": 40, "padding": [1, 1]}),
    "depthwise with stride": ((1, 70, 9, 8), 70, (5, 5), {"groups": 70, "padding": [2, 2], "stride": [2, 2]}),
    "depthwise twice": ((1, 24, 9, 8), 48, (3, 3), {"groups": 24}),
}


@BOTH
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    image, outputs, kernel, attrs = SHAPES[name]
    program = graph.check(convolve(graph, image, outputs, kernel, **attrs))
    assert steps(program) == 1


def steps(program: CompiledProgram) -> int:
    return len(program.functions["main"].steps)


@BOTH
@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("channels", [32, 20])
def test_residual_and_relu(channels: int, groups: int, dtype: torch.dtype) -> None:
    groups = 1 if groups == 1 else channels
    graph = Graph(dtype)
    result = convolve(graph, (2, channels, 9, 9), channels, (3, 3), padding=[1, 1], groups=groups)
    result = graph.call("relu", graph.call("add.Tensor", result, graph.input(2, channels, 9, 9)))
    assert steps(graph.check(result, roundings=2)) == 1


@pytest.mark.parametrize("channels", [3, 20, 65])
def test_padding_of_channels_never_reaches_a_result(channels: int) -> None:
    """The second convolution reads what the first one stored; the padding between its channels holds NaN."""
    graph = Graph()
    middle = graph.call("relu", convolve(graph, (1, 8, 6, 6), channels, (3, 3)))
    weight = graph.weight(16, channels, 3, 3)
    result = graph.call("conv2d", middle, weight, None, [1, 1], [1, 1], [1, 1], 1)
    assert steps(graph.check(result, roundings=4)) == 2


def test_no_bias() -> None:
    graph = Graph()
    graph.check(convolve(graph, (1, 16, 6, 6), 32, (3, 3), bias=False))


def test_image_that_is_a_view() -> None:
    """Every other column of a transposed image: no stride is the one that kernels like."""
    graph = Graph()
    image = graph.call("slice.Tensor", graph.call("permute", graph.input(1, 9, 16, 8), [0, 3, 1, 2]), 3, 0, 16, 2)
    weight = graph.weight(16, 8, 3, 3)
    graph.check(graph.call("conv2d", image, weight, None, [1, 1], [1, 1], [1, 1], 1))


@pytest.mark.parametrize("groups", [1, 2])
def test_weight_that_is_computed(groups: int) -> None:
    """A weight in the model's own order, which no single stride walks."""
    graph = Graph()
    weight = graph.call("mul.Tensor", graph.input(10, 6 // groups, 3, 3), graph.input(10, 1, 1, 1))
    image = graph.input(1, 6, 8, 8)
    graph.check(graph.call("conv2d", image, weight, None, [1, 1], [1, 1], [1, 1], groups), roundings=2)


def test_epilogue_operand_along_the_width() -> None:
    graph = Graph()
    result = graph.call("add.Tensor", convolve(graph, (2, 8, 6, 7), 16, (3, 3)), graph.input(1, 1, 1, 5))
    assert steps(graph.check(result, roundings=2)) == 1


def test_result_in_the_models_order() -> None:
    """Flattened for a linear layer."""
    graph = Graph()
    features = graph.call("relu", convolve(graph, (2, 8, 6, 7), 16, (3, 3)))
    graph.check(graph.call("linear", graph.call("flatten.using_ints", features, 1), graph.weight(10, 320)), roundings=4)


def test_image_that_is_too_large_with_its_padding() -> None:
    builder = IRBuilder("large")
    arguments = (builder.input("x", (1, 1, 8192, 8192)), builder.weight("w", (1, 1, 3, 3)), None, [1, 1])
    with pytest.raises(UnsupportedOpError, match="4294967296 elements, more than kernels address"):
        compile(builder.build(builder.call("aten.conv2d.default", *arguments)))
