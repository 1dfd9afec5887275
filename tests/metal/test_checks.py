"""Every kernel, as generated: nothing that Apple's compiler would refuse, no race, no access out of bounds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from metal_runtime.metal_api import MetalApi
from npu_runtime import Device, MetalBackend
from software_gpu import metal
from software_gpu.checks import find_problems
from tests.metal.graphs import Graph, Node


def tiled(graph: Graph) -> Node:
    return graph.call("relu", graph.call("linear", graph.input(20, 24), graph.weight(40, 24), graph.weight(40)))


def tiled_with_odd_sizes(graph: Graph) -> Node:
    return graph.call("bmm", graph.input(2, 9, 13), graph.input(2, 13, 11))


def tiled_with_transposed_left_side(graph: Graph) -> Node:
    return graph.call("mm", graph.call("permute", graph.input(24, 32), [1, 0]), graph.input(24, 16))


def vector(graph: Graph) -> Node:
    return graph.call("linear", graph.input(1, 64), graph.weight(18, 64), graph.weight(18))


def vector_with_odd_sizes(graph: Graph) -> Node:
    return graph.call("linear", graph.input(1, 51), graph.weight(5, 51))


def vector_by_columns(graph: Graph) -> Node:
    return graph.call("mm", graph.input(1, 20), graph.input(20, 36))


def vector_by_odd_columns(graph: Graph) -> Node:
    return graph.call("mm", graph.input(1, 20), graph.input(20, 33))


def gated_activation(rows: int) -> Callable[[Graph], Node]:
    """Paired columns."""

    def build(graph: Graph) -> Node:
        x = graph.input(rows, 24)
        gate, up = (graph.call("linear", x, graph.weight(10, 24)) for _ in range(2))
        return graph.call("mul.Tensor", graph.call("silu", gate), up)

    return build


def norm_before_vector(graph: Graph) -> Node:
    x = graph.call("layer_norm", graph.input(1, 40), [40], graph.weight(40), graph.weight(40), 1e-5)
    return graph.call("linear", x, graph.weight(70, 40))


def attention(rows: int, length: int, mask: str, size: int = 12) -> Callable[[Graph], Node]:
    def build(graph: Graph) -> Node:
        q, k, v = (graph.input(1, heads, n, size) for heads, n in ((4, rows), (2, length), (2, length)))
        is_open = (torch.arange(length) < length - 10)[None]
        added = torch.where(is_open, 0.0, -torch.inf).half()
        masks = {"none": None, "causal": None, "added": graph.input(1, length, data=added)}
        if mask == "boolean":
            masks[mask] = Node(graph.input(1, length, dtype=torch.bool, data=is_open).value, is_open)
        options = [masks[mask], 0.0, mask == "causal"]
        return graph.call("scaled_dot_product_attention", q, k, v, *options, enable_gqa=True)

    return build


def convolution(channels: int, outputs: int, groups: int) -> Callable[[Graph], Node]:
    def build(graph: Graph) -> Node:
        image, weight = graph.input(1, channels, 6, 7), graph.weight(outputs, channels // groups, 3, 3)
        result = graph.call("conv2d", image, weight, graph.weight(outputs), [1, 1], [1, 1], [1, 1], groups)
        return graph.call("add.Tensor", result, graph.input(1, outputs, 6, 7))

    return build


def max_pool(graph: Graph) -> Node:
    return graph.call("max_pool2d", graph.input(1, 20, 7, 7), [3, 3], [2, 2], [1, 1])


def mean_pool(graph: Graph) -> Node:
    return graph.call("avg_pool2d", graph.input(1, 20, 7, 7), [3, 3], [2, 2], [1, 1])


def adaptive_pool(graph: Graph) -> Node:
    image = graph.call("permute", graph.input(1, 7, 5, 6), [0, 3, 1, 2])
    return graph.call("adaptive_avg_pool2d", image, [3, 2])


GRAPHS: dict[str, Callable[[Graph], Node]] = {
    "tiled": tiled,
    "tiled, odd sizes": tiled_with_odd_sizes,
    "tiled, transposed left side": tiled_with_transposed_left_side,
    "vector": vector,
    "vector, odd sizes": vector_with_odd_sizes,
    "vector by columns": vector_by_columns,
    "vector by odd columns": vector_by_odd_columns,
    "paired columns": gated_activation(11),
    "paired columns, vector": gated_activation(1),
    "norm before a vector": norm_before_vector,
    "attention": attention(11, 37, "none"),
    "attention, causal": attention(11, 37, "causal"),
    "attention, booleans": attention(1, 40, "boolean"),
    "attention, added mask": attention(11, 37, "added"),
    "attention of few rows": attention(1, 80, "boolean", 64),
    "attention in parts": attention(1, 4100, "added"),
    "convolution": convolution(16, 24, 1),
    "convolution, odd channels": convolution(3, 5, 1),
    "convolution in groups": convolution(32, 32, 2),
    "convolution in small groups": convolution(8, 16, 4),
    "depthwise convolution": convolution(20, 20, 20),
    "max pool": max_pool,
    "mean pool": mean_pool,
    "adaptive pool": adaptive_pool,
}


def software_gpu(**options: Any) -> Device:
    return Device(MetalBackend(MetalApi(metal, metal.create_device(**options), nullcontext)))


@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_that_metal_refuses(name: str) -> None:
    graph = Graph()
    for kernel in graph.compile(GRAPHS[name](graph)).functions["main"].kernels:
        assert find_problems(kernel.text) == []


@pytest.mark.parametrize("name", GRAPHS)
def test_no_race_and_no_access_out_of_bounds(name: str) -> None:
    graph = Graph()
    graph.check(GRAPHS[name](graph), roundings=2, device=software_gpu(check=True))


@pytest.mark.parametrize("name", GRAPHS)
def test_threads_in_reversed_order(name: str) -> None:
    graph = Graph()
    graph.check(GRAPHS[name](graph), roundings=2, device=software_gpu(reversed_threads=True))
