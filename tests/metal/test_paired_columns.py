"""Products whose epilogue combines two neighbouring columns, such as a gated activation, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

from tests.metal.graphs import Graph, Node
from tests.metal.test_matmul import BOTH, entries


def gated(graph: Graph, x: Node, width: int) -> Node:
    """``silu(x @ a.T) * (x @ b.T)``: two linears that become one."""
    size = x.reference.shape[-1]
    gate, up = (graph.call("linear", x, graph.weight(width, size)) for _ in range(2))
    return graph.call("mul.Tensor", graph.call("silu", gate), up)


@BOTH
@pytest.mark.parametrize(("rows", "width", "size"), [(1, 40, 64), (1, 33, 51), (30, 40, 64), (65, 37, 24), (3, 1, 8)])
def test_gated_activation(rows: int, width: int, size: int, dtype: torch.dtype) -> None:
    graph = Graph(dtype)
    program = graph.check(gated(graph, graph.input(rows, size), width), roundings=3)
    assert entries(program) == ["matvec" if rows == 1 else "matmul"]


@pytest.mark.parametrize("rows", [1, 9])
def test_further_operands(rows: int) -> None:
    graph = Graph()
    x = graph.input(2, rows, 24)
    gate, up = (graph.call("linear", x, graph.weight(12, 24), graph.weight(12)) for _ in range(2))
    scaled = graph.call("mul.Tensor", up, graph.input(2, rows, 12))
    result = graph.call("mul.Tensor", graph.call("silu", gate), scaled)
    assert len(entries(graph.check(result, roundings=4))) == 1


@pytest.mark.parametrize("start", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (1, 66), (20, 48)])
def test_every_other_column(rows: int, columns: int, start: tuple[int, int]) -> None:
    """Columns that are told apart by the model itself, of a matrix that lies column by column."""
    graph = Graph()
    product = graph.call("mm", graph.input(rows, 20), graph.weight(20, columns))
    first, second = (graph.call("slice.Tensor", product, 1, i, columns, 2) for i in start)
    program = graph.check(graph.call("sub.Tensor", graph.call("relu", first), second), roundings=3)
    assert entries(program) == ["matvec_columns" if rows == 1 else "matmul"]
