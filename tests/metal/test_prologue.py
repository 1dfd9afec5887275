"""A vector that is computed inside of the product with it, such as a norm's result, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

from tests.metal.graphs import Graph, Node
from tests.metal.test_matmul import BOTH, entries


def rms_norm(graph: Graph, x: Node) -> Node:
    exact = graph.call("to.dtype", x, torch.float32)
    mean = graph.call("mean.dim", graph.call("pow.Tensor_Scalar", exact, 2), [-1], True)
    scaled = graph.call("mul.Tensor", exact, graph.call("rsqrt", graph.call("add.Tensor", mean, 1e-5)))
    return graph.call("mul.Tensor", graph.weight(x.reference.shape[-1]), graph.call("to.dtype", scaled, graph.dtype))


def layer_norm(graph: Graph, x: Node) -> Node:
    size = x.reference.shape[-1]
    return graph.call("layer_norm", x, [size], graph.weight(size), graph.weight(size), 1e-5)


def activation(graph: Graph, x: Node) -> Node:
    return graph.call("mul.Tensor", graph.call("sigmoid", x), graph.input(*x.reference.shape))


BUILDERS = pytest.mark.parametrize("before", [rms_norm, layer_norm, activation])


@BOTH
@BUILDERS
@pytest.mark.parametrize(("size", "width"), [(64, 200), (51, 33)])
def test_one_row(before: object, size: int, width: int, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    x = before(graph, graph.input(1, 1, size))  # type: ignore[operator]
    result = graph.call("linear", x, graph.weight(width, size), graph.weight(width))
    assert entries(graph.check(graph.call("relu", result), roundings=4)) == ["matvec"]


@pytest.mark.parametrize(("size", "taken"), [(12288, True), (12289, False)])
def test_sizes_that_threadgroup_memory_holds(size: int, taken: bool) -> None:
    graph = Graph()
    x = activation(graph, graph.input(1, size))
    program = graph.check(graph.call("linear", x, graph.weight(70, size)), roundings=3)
    assert entries(program) == (["matvec"] if taken else ["elementwise", "matvec"])


def test_rows_of_a_table() -> None:
    graph = Graph()
    table = graph.weight(30, 40)
    token = Node(graph.input(1, dtype=torch.int64, data=torch.tensor([7])).value, torch.tensor([7]))
    x = rms_norm(graph, graph.call("embedding", table, token))
    assert entries(graph.check(graph.call("linear", x, graph.weight(20, 40)), roundings=3)) == ["matvec"]


def test_a_gated_activation_after_a_norm() -> None:
    graph = Graph(torch.bfloat16)
    x = rms_norm(graph, graph.input(1, 96))
    gate, up = (graph.call("linear", x, graph.weight(50, 96)) for _ in range(2))
    result = graph.call("mul.Tensor", graph.call("silu", gate), up)
    assert entries(graph.check(result, roundings=4)) == ["matvec"]


@pytest.mark.parametrize("reason", ["two rows", "another reader", "an output", "columns"])
def test_kept_apart(reason: str) -> None:
    """What more than one kernel needs, or the kernel cannot compute, is stored."""
    graph = Graph()
    x = rms_norm(graph, graph.input(2 if reason == "two rows" else 1, 32))
    weight = graph.weight(32, 24) if reason == "columns" else graph.weight(24, 32)
    result = graph.call("mm" if reason == "columns" else "linear", x, weight)
    others = {"an output": [x], "another reader": [graph.call("mm", x, graph.weight(32, 8))]}
    program = graph.check(result, *others.get(reason, []), roundings=4)
    assert entries(program)[0] == "rows"
