"""The rewriting engine: what a rule finds, and that a near miss says what was in the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.graph_optimizer import optimize
from npu_compiler.ir import IRGraph
from npu_compiler.ir_reader import read_graph
from npu_compiler.ops.registry import terms
from npu_compiler.rewrite import PatternOps
from tests.support.ir_builder import IRBuilder, Value
from tests.support.reference_target import plan_ir


def notes(builder: IRBuilder, *outputs: Value) -> tuple[str, ...]:
    return optimize(read_graph(builder.build(*outputs))).notes


def ops(graph: IRGraph) -> list[str]:
    return [node.op.split(".")[1] for node in graph.nodes]


class Attention:
    """Attention spelled out, ``softmax(q @ k.T / scale) @ v``."""

    def __init__(self, scale: Any = 2.0, shape: tuple[int, ...] = (1, 2, 4, 8)) -> None:
        self.builder = IRBuilder()
        call = self.builder.call
        q, k, v = (self.builder.input(name, shape) for name in "qkv")
        rank = len(shape)
        scores = call("aten.matmul.default", q, call("aten.transpose.int", k, rank - 2, rank - 1), name="scores")
        if scale == "tensor":
            scaled = call("aten.mul.Tensor", scores, self.builder.input("scale", (1,)), name="scaled")
        else:
            scaled = call("aten.div.Tensor", scores, scale, name="scaled")
        self.weights = call("aten.softmax.int", scaled, -1, name="weights")
        self.result = call("aten.matmul.default", self.weights, v, name="result")


def test_attention_needs_no_note() -> None:
    form = Attention()
    graph = optimize(read_graph(form.builder.build(form.result)))
    assert ops(graph) == ["scaled_dot_product_attention"]
    assert not graph.notes


def test_weights_of_attention_that_somebody_reads_are_named() -> None:
    form = Attention()
    (note,) = notes(form.builder, form.result, form.weights)
    assert note == "'result' is not rewritten as attention by one kernel: 'weights' is an output"


def test_a_scale_that_is_a_tensor_is_named() -> None:
    form = Attention("tensor")
    (note,) = notes(form.builder, form.result)
    assert "its scale 'scale' is a tensor, expected a number" in note


def test_heads_of_three_dimensions_are_named() -> None:
    form = Attention(shape=(2, 4, 8))
    (note,) = notes(form.builder, form.result)
    assert "[2, 4, 8], [2, 4, 8], [2, 4, 8], expected four dimensions" in note


def _normed(statistics: str = "weight") -> tuple[IRBuilder, Value, Value]:
    builder = IRBuilder()
    x = builder.input("x", (1, 3, 5, 5))
    convolution = builder.call("aten.conv2d.default", x, builder.weight("w", (4, 3, 3, 3)), name="conv")
    given = [getattr(builder, statistics)(name, (4,)) for name in ("gain", "shift", "average", "variance")]
    return (
        builder,
        convolution,
        builder.call("aten.batch_norm.default", convolution, *given, False, 0.1, 1e-5, True, name="bn"),
    )


def test_a_convolution_that_somebody_else_reads_is_named_in_the_description() -> None:
    builder, convolution, normed = _normed()
    program = npu_compiler.compile(builder.build(normed, convolution))
    reason = "'bn' is not rewritten as a convolution with the BatchNorm in its weights: 'conv' is an output"
    assert program.main.notes == (reason,)
    assert reason in program.describe()


def test_statistics_that_are_no_weights_are_named() -> None:
    builder, _, normed = _normed("input")
    (note,) = notes(builder, normed)
    assert "'gain' is no tensor of the weight file" in note


def test_a_weight_that_keeps_a_linear_from_others_is_named() -> None:
    builder = IRBuilder()
    x, shared = builder.input("x", (4, 8)), builder.weight("shared", (8, 8))
    first, second, third = (
        builder.call("aten.linear.default", x, weight, name=name)
        for name, weight in (
            ("first", builder.weight("one", (8, 8))), ("second", builder.weight("two", (8, 8))), ("third", shared),
        )
    )  # fmt: skip
    again = builder.call("aten.linear.default", first, shared, name="again")
    graph = optimize(read_graph(builder.build(second, third, again)))
    assert graph.notes == (
        "'third' is not rewritten as one product with others of its input: 'p_shared' is also read by 'again'",
    )
    assert ops(graph).count("linear") == 3


def test_shared_parts_of_a_pattern_stay_for_their_other_readers() -> None:
    """A transposed weight that is also an output: the product becomes a linear all the same."""
    builder = IRBuilder()
    x, weight = builder.input("x", (4, 8)), builder.weight("w", (6, 8))
    turned = builder.call("aten.t.default", weight)
    product = builder.call("aten.mm.default", x, turned, name="product")
    ir = builder.build(product, turned)
    graph = optimize(read_graph(ir))
    assert sorted(ops(graph)) == ["linear", "t"]
    assert not graph.notes
    values = {"x": torch.rand(4, 8), "w": torch.rand(6, 8)}
    result, transposed = plan_ir(ir).run({"x": values["x"]}, {"w": values["w"]})
    np.testing.assert_allclose(result, values["x"] @ values["w"].T, rtol=1e-5)
    np.testing.assert_allclose(transposed, values["w"].T, rtol=1e-6)


def test_equations_are_written_with_terms_of_ops_alone() -> None:
    assert {"attention", "batch_norm", "linear", "matmul", "reshape"} <= set(terms())
    with pytest.raises(AttributeError, match=r"equations know add, .* not 'conv3d'"):
        PatternOps().conv3d()
