"""Pooling on the Metal kernels, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.metal.graphs import Graph, Node

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat"])

MAXIMUM: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "resnet": ((1, 64, 16, 16), ([3, 3], [2, 2], [1, 1])),
    "few channels": ((2, 5, 9, 8), ([2, 2],)),
    "dilated": ((1, 8, 11, 12), ([3, 2], [1, 2], [1, 1], [2, 3])),
    "ceil": ((1, 8, 10, 9), ([3, 3], [2, 2], [0, 0], [1, 1], True)),
    "ceil with padding": ((1, 70, 7, 8), ([2, 2], [2, 2], [1, 1], [1, 1], True)),
}
MEAN: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "plain": ((2, 16, 9, 8), ([2, 2],)),
    "padding counts": ((1, 12, 9, 8), ([3, 3], [2, 2], [1, 1])),
    "padding does not count": ((1, 12, 9, 8), ([3, 3], [2, 2], [1, 1], False, False)),
    "ceil": ((1, 12, 10, 9), ([3, 3], [2, 2], [1, 1], True)),
    "ceil, padding does not count": ((1, 12, 10, 9), ([3, 3], [2, 2], [1, 1], True, False)),
    "divisor": ((1, 12, 9, 8), ([3, 3], [2, 2], [1, 1], False, True, 5)),
}


@BOTH
@pytest.mark.parametrize("name", MAXIMUM)
def test_max_pool(name: str, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    shape, attrs = MAXIMUM[name]
    graph.check(graph.call("max_pool2d", graph.input(*shape), *attrs))


@BOTH
@pytest.mark.parametrize("name", MEAN)
def test_avg_pool(name: str, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    shape, attrs = MEAN[name]
    graph.check(graph.call("avg_pool2d", graph.input(*shape), *attrs))


@BOTH
@pytest.mark.parametrize(("size", "out"), [((7, 7), (1, 1)), ((7, 9), (3, 2)), ((3, 4), (7, 5)), ((8, 8), (4, 4))])
def test_adaptive_avg_pool(size: tuple[int, int], out: tuple[int, int], dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    graph.check(graph.call("adaptive_avg_pool2d", graph.input(2, 20, *size), list(out)))


def test_nan_wins() -> None:
    data = torch.randn(1, 4, 6, 6)
    data[0, 1, 2, 3] = float("nan")
    data[0, 2] = -float("inf")
    graph = Graph()
    graph.check(graph.call("max_pool2d", graph.input(1, 4, 6, 6, data=data), [2, 2]))


def test_image_without_a_batch() -> None:
    graph = Graph()
    graph.check(graph.call("max_pool2d", graph.input(5, 6, 6), [2, 2]))


def test_epilogue() -> None:
    graph = Graph()
    pooled: Node = graph.call("avg_pool2d", graph.input(1, 20, 8, 8), [2, 2])
    result = graph.call("relu", graph.call("add.Tensor", pooled, graph.input(1, 20, 4, 4)))
    assert len(graph.check(result, roundings=2).functions["main"].steps) == 1
