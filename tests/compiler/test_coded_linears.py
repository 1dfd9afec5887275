"""Linears of one input by packed codes become one product, whose weight's parts are put together at load time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from npu_compiler.frontend import coded_layers
from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.graph.coded_linears import merged_coded_linears
from npu_compiler.graph.rewrite import apply
from npu_compiler.ir import IRGraph
from tests.support.ir_builder import IRBuilder, Value
from tests.support.reference_target import plan_ir

assert coded_layers  # which defines npu_codes::dequantize

_K, _GROUP = 32, 8


class Graph:
    """Linears of one input of three rows; what their weights hold, and are, by name."""

    def __init__(self) -> None:
        self.builder = IRBuilder()
        self.x = self.builder.input("x", (3, _K), torch.float16)
        self.held: dict[str, torch.Tensor] = {}
        self.random = torch.Generator().manual_seed(0)

    def weight(self, name: str, tensor: torch.Tensor) -> Value:
        self.held[name] = tensor
        return self.builder.weight(name, tensor.shape, tensor.dtype)

    def linear(self, name: str, n: int, zeros: bool = True, group: int = _GROUP, rows: int = 1) -> Value:
        shape, groups = (n // rows, _K // group), _K // group
        codes = torch.randint(0, 256, (n, _K // 2), generator=self.random, dtype=torch.uint8)
        points = torch.randint(0, 256, (n // rows, (groups + 1) // 2), generator=self.random, dtype=torch.uint8)
        parts: list[Any] = [self.weight(f"{name}.codes", codes)]
        parts += [self.weight(f"{name}.scales", torch.rand(shape, generator=self.random).half())]
        parts += [self.weight(f"{name}.zeros", points) if zeros else None, None, None]
        options = (4, _K, group, rows, 0, torch.float16)
        return self.call("aten.linear.default", self.x, self.call("npu_codes.dequantize.default", *parts, *options))

    def call(self, op: str, *args: Any) -> Value:
        return self.builder.call(op, *args)

    def merged(self, *outputs: Value) -> IRGraph:
        return apply(
            read_graph(self.builder.build(*outputs)), merged_coded_linears(lambda input, weight: True)
        ).verify()

    def numbers(self, name: str, rows: int = 1) -> torch.Tensor:
        codes, scales, zeros = (self.held.get(f"{name}.{part}") for part in ("codes", "scales", "zeros"))
        assert scales is not None
        options = (4, _K, _GROUP, rows, 0, torch.float64)
        made: torch.Tensor = torch.ops.npu_codes.dequantize(codes, scales.double(), zeros, None, None, *options)
        return made


def products(graph: IRGraph) -> int:
    return sum(node.op == "aten.linear.default" for node in graph.nodes)


def test_three_of_one_form_are_one_product() -> None:
    graph = Graph()
    outputs = [graph.linear(name, n) for name, n in (("q", 12), ("k", 4), ("v", 4))]
    assert products(graph.merged(*outputs)) == 1
    x = torch.randn(3, _K, generator=graph.random).half()
    plan = plan_ir(graph.builder.build(*outputs))
    results = plan.run({"x": x}, graph.held)
    assert sum(group.problem is not None for group in plan.groups) == 1
    for name, result in zip("qkv", results, strict=True):
        np.testing.assert_allclose(result, (x.double() @ graph.numbers(name).T).numpy(), rtol=1e-5, atol=1e-4)


def test_gate_and_up_take_turns() -> None:
    graph = Graph()
    gate, up = (graph.linear(name, 6) for name in ("gate", "up"))
    output = graph.call("aten.mul.Tensor", graph.call("aten.silu.default", gate), up)
    assert {recipe.transform for recipe in graph.merged(output).weights.values()} == {"interleave"}
    x = torch.randn(3, _K, generator=graph.random).half()
    plan = plan_ir(graph.builder.build(output))
    (result,) = plan.run({"x": x}, graph.held)
    assert [group.pairs for group in plan.groups] == [2]
    left, right = (x.double() @ graph.numbers(name).T for name in ("gate", "up"))
    np.testing.assert_allclose(result, (torch.nn.functional.silu(left) * right).numpy(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("other", [{"zeros": False}, {"group": 16}])
def test_other_forms_stay_apart(other: dict[str, Any]) -> None:
    graph = Graph()
    assert products(graph.merged(graph.linear("a", 8), graph.linear("b", 8, **other))) == 2


def test_rows_that_share_scales_do_not_take_turns() -> None:
    graph = Graph()
    gate, up = (graph.linear(name, 8, zeros=False, rows=4) for name in ("gate", "up"))
    output = graph.call("aten.mul.Tensor", graph.call("aten.silu.default", gate), up)
    assert {recipe.transform for recipe in graph.merged(output).weights.values()} == {"concatenate"}


def test_parts_that_others_read_are_an_obstacle() -> None:
    graph = Graph()
    left, right = graph.linear("a", 8), graph.linear("b", 8)
    ir = graph.builder.build(left, right)
    ir["nodes"].append(
        {
            "name": "seen",
            "op_type": "aten.neg.default",
            "inputs": [{"name": "p_a_scales", "shape": [8, 4], "dtype": "float16"}],
            "outputs": [{"name": "seen", "shape": [8, 4], "dtype": "float16"}],
            "attrs": {},
        }
    )
    ir["graph_outputs"].append(
        {"name": "seen", "shape": [8, 4], "dtype": "float16", "producer_node": "seen", "producer_output_idx": 0}
    )
    merged = apply(read_graph(ir), merged_coded_linears())
    assert products(merged) == 2
    assert any("'p_a_scales' is also read" in note for note in merged.notes)
