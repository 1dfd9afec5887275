"""Quotients: those of activations may miss the last place, a model's own division may not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npu_runtime import Device
from tests.cuda.test_matvec import CUDAGraph
from tests.metal.graphs import Node

ACTIVATIONS = ("sigmoid", "silu")
_LAST_PLACE = 2.0**-23
_VALUES = [0.0, -0.0, 1e-20, -1e-20, 87.5, -87.5, 88.5, -88.5, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]


def exact(graph: CUDAGraph) -> Node:
    """An input with everything that an exponential meets, in float32."""
    spread = torch.linspace(-90, 90, 499, dtype=torch.float64)
    values = graph.input(512, data=torch.cat([torch.tensor(_VALUES, dtype=torch.float64), spread]))
    return graph.call("to.dtype", values, torch.float32)


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_activations_miss_little_more_than_the_last_place(op: str, device: Device) -> None:
    """The exponential may miss two units, its sum with one half of one, and the quotient two and a half."""
    graph = CUDAGraph(torch.bfloat16)
    result = graph.call(op, exact(graph))
    [found] = graph.run(graph.compile(result), device)
    lost = 90 * 2.0**-126  # a reciprocal that becomes zero, times what it belongs to
    torch.testing.assert_close(found, result.reference.double(), rtol=6 * _LAST_PLACE, atol=lost, equal_nan=True)


def test_a_softmax_misses_little_more_than_the_last_place(device: Device) -> None:
    graph = CUDAGraph(torch.bfloat16)
    rows = graph.call("to.dtype", graph.input(7, 300), torch.float32)
    result = graph.call("softmax.int", rows, -1)
    [found] = graph.run(graph.compile(result), device)
    torch.testing.assert_close(found, result.reference.double(), rtol=32 * _LAST_PLACE, atol=0)


def test_a_models_own_division_is_exact(device: Device) -> None:
    graph = CUDAGraph(torch.bfloat16)
    a, b = (graph.call("to.dtype", graph.input(512), torch.float32) for _ in range(2))
    [found] = graph.run(graph.compile(graph.call("div.Tensor", a, b)), device)
    expected = a.reference.numpy().astype(np.float32) / b.reference.numpy().astype(np.float32)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize(("op", "operands"), [*((op, 1) for op in ACTIVATIONS), ("div.Tensor", 2)])
def test_a_models_own_division_does_without(op: str, operands: int) -> None:
    graph = CUDAGraph(torch.float16)
    [kernel] = graph.compile(graph.call(op, *(graph.input(64) for _ in range(operands)))).main.kernels
    assert ("= quotient(" in kernel.text) == (op in ACTIVATIONS)
