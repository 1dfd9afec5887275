"""Graph passes: what they change, what they leave, and that the result computes the same."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from npu_compiler.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT64
from npu_compiler.frontend.ir_reader import read_graph
from npu_compiler.graph.data_types import assign_dtypes
from npu_compiler.graph.functional import functionalize
from npu_compiler.graph.fusion_patterns import merged_linears
from npu_compiler.graph.graph_optimizer import eliminate_noops, fold_batch_norms
from npu_compiler.graph.rewrite import apply
from npu_compiler.ir import IRGraph
from tests.support.ir_builder import IRBuilder, Value, overload_of
from tests.support.reference_target import plan_ir

CHANNELS = 6


def ops(graph: IRGraph) -> list[str]:
    return [node.op.split(".")[1] for node in graph.nodes]


# ---- BatchNorm


class Normed:
    """conv2d and the BatchNorm after it, with weights of both."""

    def __init__(self, bias: bool = False, gamma: bool = True, beta: bool = True) -> None:
        self.builder = IRBuilder()
        self.x = self.builder.input("x", (2, 3, 5, 5))
        self.convolution = self.convolve("conv", bias)
        self.output = self.normalize(self.convolution, "bn", gamma, beta)

    def convolve(self, name: str, bias: bool = False) -> Value:
        weight = self.builder.weight(f"{name}.weight", (CHANNELS, 3, 3, 3))
        shift = self.builder.weight(f"{name}.bias", (CHANNELS,)) if bias else None
        return self.builder.call("aten.conv2d.default", self.x, weight, shift, name=name)

    def normalize(self, x: Value, name: str, gamma: bool = True, beta: bool = True) -> Value:
        scale = self.builder.weight(f"{name}.weight", (CHANNELS,)) if gamma else None
        shift = self.builder.weight(f"{name}.bias", (CHANNELS,)) if beta else None
        mean = self.builder.weight(f"{name}.running_mean", (CHANNELS,))
        variance = self.builder.weight(f"{name}.running_var", (CHANNELS,))
        statistics = (scale, shift, mean, variance)
        return self.builder.call("aten.batch_norm.default", x, *statistics, False, 0.1, 1e-3, True, name=name)

    def check(self, *outputs: Value) -> int:
        """Compares with torch; gives the number of launches."""
        generator = torch.Generator().manual_seed(0)
        ir = self.builder.build(*outputs)
        weights = {
            spec["name"]: torch.rand(spec["shape"], generator=generator, dtype=torch.float64) + 0.5
            for spec in ir["weights"]
        }
        x = torch.rand((2, 3, 5, 5), generator=generator, dtype=torch.float64)
        convolved = F.conv2d(x, weights["conv.weight"], weights.get("conv.bias"))
        w = [weights.get(f"bn.{key}") for key in ("running_mean", "running_var", "weight", "bias")]
        normed = F.batch_norm(convolved, w[0], w[1], w[2], w[3], eps=1e-3)
        expected = {"conv": convolved, "bn": normed}
        planned = plan_ir(ir)
        for result, value in zip(planned.run({"x": x}, weights), outputs, strict=True):
            np.testing.assert_allclose(result, expected[value.name].numpy(), rtol=1e-5)
        return len(planned.groups)


@pytest.mark.parametrize("beta", [True, False])
@pytest.mark.parametrize("gamma", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_batch_norm_folds_into_its_convolution(bias: bool, gamma: bool, beta: bool) -> None:
    model = Normed(bias, gamma, beta)
    folded = fold_batch_norms(read_graph(model.builder.build(model.output))).verify()
    if gamma or not beta:
        assert ops(folded) == ["conv2d"]
        assert [recipe.transform for recipe in folded.weights.values()] == [
            "fold_weight",
            "fold_given_bias" if bias else "fold_bias",
        ]
    assert model.check(model.output) == 1


def test_a_convolution_with_a_second_reader_is_left_and_the_batch_norm_computed() -> None:
    model = Normed()
    both = (model.convolution, model.output)
    assert "batch_norm" in ops(fold_batch_norms(read_graph(model.builder.build(*both))))
    assert model.check(*both) == 2


def test_a_weight_shared_by_two_convolutions_folds_into_each() -> None:
    model = Normed()
    weight = Value("p_conv_weight", torch.empty((CHANNELS, 3, 3, 3), device="meta"))
    other = model.builder.call("aten.conv2d.default", model.x, weight, None, name="conv2")
    second = model.normalize(other, "bn2")
    folded = fold_batch_norms(read_graph(model.builder.build(model.output, second))).verify()
    assert ops(folded) == ["conv2d", "conv2d"]
    weights = [node.inputs["weight"] for node in folded.nodes]
    assert len(set(weights)) == 2
    assert all(folded.weights[str(name)].inputs[0].name == "conv.weight" for name in weights)


def test_a_batch_norm_after_an_activation_is_computed() -> None:
    model = Normed()
    after = model.normalize(model.builder.call("aten.relu.default", model.convolution), "bn2")
    assert "batch_norm" in ops(fold_batch_norms(read_graph(model.builder.build(after))))


def test_statistics_that_are_inputs_are_not_folded() -> None:
    builder = IRBuilder()
    x, weight = builder.input("x", (1, 3, 5, 5)), builder.weight("w", (CHANNELS, 3, 3, 3))
    mean, variance = builder.input("mean", (CHANNELS,)), builder.input("variance", (CHANNELS,))
    convolved = builder.call("aten.conv2d.default", x, weight)
    normed = builder.call("aten.batch_norm.default", convolved, None, None, mean, variance, False, 0.1, 1e-5, True)
    assert ops(fold_batch_norms(read_graph(builder.build(normed)))) == ["conv2d", "batch_norm"]


# ---- in-place ops


def _changed(*more: tuple[str, tuple[Any, ...]], read_base: bool) -> dict[str, Any]:
    """x = tanh(input), a chain of views of it, relu_ on the last; then x, or the result, is read."""
    builder = IRBuilder()
    x = builder.call("aten.tanh.default", builder.input("input", (4, 4)), name="base")
    seen = x
    for op, attrs in more:
        seen = builder.call_all(op, seen, *attrs)[0]
    changed = builder.call("aten.relu_.default", seen, name="change")
    return builder.build(builder.call("aten.neg.default", x if read_base else changed))


@pytest.mark.parametrize(
    "views",
    [
        [("aten.view.default", ((16,),))],
        [("aten.select.int", (0, 1)), ("aten.unsqueeze.default", (0,))],
        [("aten.split.Tensor", (2,))],
        [("aten.detach.default", ())],
        [("aten.to.dtype", (torch.float32,))],
        [("aten.contiguous.default", ())],
    ],
    ids=lambda views: "+".join(op.split(".")[1] for op, _ in views),
)
def test_a_base_that_changes_through_a_view_is_read_as_it_has_become(views: Any) -> None:
    ir = _changed(*views, read_base=True)
    graph = functionalize(read_graph(ir)).verify()
    assert graph.nodes[-1].inputs["self"] in ("change", "base.change")
    base = torch.rand(4, 4, dtype=torch.float64) - 0.5
    kept = base.tanh()
    seen: Any = kept
    for op, attrs in views:
        seen = _first(overload_of(op)(seen, *attrs))
    seen.relu_()
    if not any(op == "aten.to.dtype" for op, _ in views):  # a copy in float64, of which it is a view in float32
        np.testing.assert_allclose(plan_ir(ir).run({"input": base})[0], -kept.numpy())
    functionalize(read_graph(_changed(*views, read_base=False))).verify()


def _first(result: Any) -> Any:
    return result if isinstance(result, torch.Tensor) else result[0]


def test_a_view_that_is_an_output_is_what_it_has_become() -> None:
    builder = IRBuilder()
    x = builder.call("aten.tanh.default", builder.input("input", (4, 4)))
    flat = builder.call("aten.view.default", x, (16,), name="flat")
    builder.call("aten.relu_.default", x, name="change")
    graph = functionalize(read_graph(builder.build(flat))).verify()
    assert graph.outputs == ("flat.change",)


def test_changing_a_copy_leaves_the_original() -> None:
    graph = functionalize(read_graph(_changed(("aten.clone.default", ()), read_base=True))).verify()
    assert graph.nodes[-1].inputs["self"] == "base"


def test_later_readers_and_outputs_see_the_change() -> None:
    builder = IRBuilder()
    x = builder.call("aten.tanh.default", builder.input("input", (4,)), name="x")
    builder.call("aten.relu_.default", x, name="first")
    builder.call("aten.mul_.Scalar", x, 2.0, name="second")
    graph = functionalize(read_graph(builder.build(builder.call("aten.neg.default", x), x))).verify()
    assert graph.nodes[2].inputs["self"] == "first"
    assert graph.nodes[3].inputs["self"] == "second"
    assert graph.outputs[1] == "second"


# ---- no-ops


def test_noops_leave_the_graph() -> None:
    builder = IRBuilder()
    x = builder.input("x", (2, 4))
    same = builder.call("aten.clone.default", builder.call("aten.detach.default", x))
    same = builder.call("aten.dropout.default", same, 0.5, False)
    same = builder.call("aten.to.dtype", same, torch.float32)
    same = builder.call("aten.reshape.default", same, (2, -1))
    same = builder.call("aten.expand.default", same, (2, 4))
    graph = eliminate_noops(read_graph(builder.build(builder.call("aten.relu.default", same), same))).verify()
    assert ops(graph) == ["relu"]
    assert graph.outputs[1] == "x"


def test_what_changes_values_stays() -> None:
    builder = IRBuilder()
    x = builder.input("x", (2, 4))
    a = builder.call("aten.to.dtype", x, torch.int64)
    b = builder.call("aten.reshape.default", x, (4, 2))
    c = builder.call("aten.transpose.int", builder.input("y", (3, 3)), 0, 1)
    assert ops(eliminate_noops(read_graph(builder.build(a, b, c)))) == ["to", "reshape", "transpose"]


# ---- data types


def _rotary() -> dict[str, Any]:
    """cos(positions * frequencies) * linear(x)."""
    builder = IRBuilder()
    x, positions = builder.input("x", (4, 8)), builder.input("positions", (4,), torch.int64)
    frequencies = builder.weight("frequencies", (8,))
    spread = builder.call("aten.to.dtype", builder.call("aten.unsqueeze.default", positions, 1), torch.float32)
    angles = builder.call("aten.mul.Tensor", spread, frequencies, name="angles")
    turned = builder.call("aten.cos.default", angles, name="cosine")
    projected = builder.call("aten.linear.default", x, builder.weight("w", (8, 8)), name="projected")
    return builder.build(builder.call("aten.mul.Tensor", projected, turned, name="product"))


@pytest.mark.parametrize("compute", [FLOAT16, BFLOAT16])
def test_angles_stay_float32_and_all_else_becomes_half_precision(compute: Any) -> None:
    graph = assign_dtypes(read_graph(_rotary()), compute).verify()
    kinds = {name: spec.dtype for name, spec in graph.tensors.items()}
    assert kinds["angles"] == kinds["p_frequencies"] == FLOAT32
    assert kinds["cosine"] == kinds["projected"] == kinds["product"] == kinds["x"] == kinds["p_w"] == compute
    assert kinds["positions"] == INT64


def test_a_half_precision_model_keeps_its_own_data_types() -> None:
    builder = IRBuilder()
    x = builder.input("x", (4, 8), torch.bfloat16)
    projected = builder.call("aten.linear.default", x, builder.weight("w", (8, 8), torch.bfloat16), name="projected")
    exact = builder.call("aten.to.dtype", projected, torch.float32, name="exact")
    graph = assign_dtypes(read_graph(builder.build(exact)), BFLOAT16)
    assert graph.tensors["projected"].dtype == BFLOAT16
    assert graph.tensors["exact"].dtype == FLOAT32


@pytest.mark.parametrize("compute", [FLOAT16, BFLOAT16])
def test_numbers_that_close_positions_become_the_largest_of_the_data_type(compute: Any) -> None:
    builder, least = IRBuilder(), float(np.finfo(np.float32).min)
    x, mask = builder.input("x", (4, 8)), builder.input("mask", (4, 8), torch.bool)
    opened = builder.call("aten.rsub.Scalar", builder.call("aten.to.dtype", mask, torch.float32), 1.0)
    added = builder.call("aten.mul.Tensor", opened, least, name="of_a_mask")
    filled = builder.call("aten.masked_fill.Scalar", x, mask, least, name="filled")
    chosen = builder.call("aten.where.ScalarOther", mask, x, -1e39, name="chosen")
    endless = builder.call("aten.masked_fill.Scalar", x, mask, float("-inf"), name="endless")
    scaled = builder.call("aten.mul.Tensor", x, 1e5, name="scaled")
    graph = assign_dtypes(read_graph(builder.build(added, filled, chosen, endless, scaled)), compute).verify()
    attrs = {node.name: node.attrs for node in graph.nodes}
    largest = float(ml_dtypes.finfo(compute.numpy).max)  # type: ignore[no-untyped-call]
    assert attrs["of_a_mask"]["other"] == attrs["filled"]["value"] == attrs["chosen"]["other"] == -largest
    assert attrs["endless"]["value"] == float("-inf")
    assert attrs["scaled"]["other"] == 1e5  # what it scales may be small


# ---- merged linears


@pytest.mark.parametrize("meet", [True, False])
def test_columns_lie_in_turns_only_where_elementwise_work_combines_them(meet: bool) -> None:
    builder = IRBuilder()
    x = builder.input("x", (4, 8))
    left, right = (builder.call("aten.linear.default", x, builder.weight(name, (6, 8))) for name in ("a", "b"))
    active = builder.call("aten.silu.default", left)
    outputs = [builder.call("aten.mul.Tensor", active, right)] if meet else [active, right]
    merged = apply(read_graph(builder.build(*outputs)), merged_linears(lambda input, weight: True)).verify()
    assert [recipe.transform for recipe in merged.weights.values()] == ["interleave" if meet else "concatenate"]
