"""Which kernels a graph becomes: fusions that the rules must find, and ones that they must not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.ir_builder import IRBuilder, Value
from tests.support.reference_target import Planned, plan_ir

SHAPE = (6, 8)


def planned(build: Callable[[IRBuilder, Value, Value], tuple[Value, ...]]) -> Planned:
    """A model of two inputs ``x`` and ``y`` [6, 8]."""
    builder = IRBuilder()
    x, y = builder.input("x", SHAPE), builder.input("y", SHAPE)
    return plan_ir(builder.build(*build(builder, x, y)))


def check(plan: Planned, *expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
    for result, function in zip(plan.run({"x": x, "y": y}), expected, strict=True):
        np.testing.assert_allclose(result, function(x, y).numpy(), rtol=1e-9, atol=1e-12)


def test_a_chain_of_elementwise_ops_is_one_kernel() -> None:
    def build(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
        gate = b.call("aten.silu.default", x)
        return (b.call("aten.relu.default", b.call("aten.add.Tensor", b.call("aten.mul.Tensor", gate, y), x)),)

    plan = planned(build)
    assert len(plan.groups) == 1
    check(plan, lambda x, y: torch.relu(F.silu(x) * y + x))


def test_a_normalisation_with_what_follows_it_is_one_kernel() -> None:
    def build(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
        square = b.call("aten.mean.dim", b.call("aten.pow.Tensor_Scalar", x, 2), [-1], True)
        scale = b.call("aten.rsqrt.default", b.call("aten.add.Scalar", square, 1e-5))
        return (b.call("aten.mul.Tensor", b.call("aten.mul.Tensor", x, scale), y),)

    plan = planned(build)
    assert len(plan.groups) == 1
    check(plan, lambda x, y: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * y)


def test_a_masked_softmax_is_one_kernel() -> None:
    def build(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
        masked = b.call("aten.masked_fill.Scalar", x, b.call("aten.gt.Scalar", y, 1.0), float("-inf"))
        return (b.call("aten.softmax.int", masked, -1),)

    plan = planned(build)
    assert len(plan.groups) == 1
    check(plan, lambda x, y: torch.softmax(x.masked_fill(y > 1.0, float("-inf")), -1))


def test_the_epilogue_of_a_product_takes_bias_activation_and_residual() -> None:
    builder = IRBuilder()
    x, y = builder.input("x", SHAPE), builder.input("y", SHAPE)
    projected = builder.call("aten.linear.default", x, builder.weight("w", (8, 8)), builder.weight("b", (8,)))
    plan = plan_ir(builder.build(builder.call("aten.add.Tensor", builder.call("aten.gelu.default", projected), y)))
    assert len(plan.groups) == 1


def test_a_residual_block_is_two_convolutions() -> None:
    builder = IRBuilder()
    x = builder.input("x", (1, 4, 5, 5))

    def convolve(value: Value, key: str) -> Value:
        convolved = builder.call("aten.conv2d.default", value, builder.weight(key, (4, 4, 3, 3)), None, [1, 1], [1, 1])
        statistics = [builder.weight(f"{key}.{name}", (4,)) for name in ("weight", "bias", "mean", "var")]
        return builder.call("aten.batch_norm.default", convolved, *statistics, False, 0.1, 1e-5, True)

    inner = convolve(builder.call("aten.relu_.default", convolve(x, "first")), "second")
    plan = plan_ir(builder.build(builder.call("aten.relu_.default", builder.call("aten.add_.Tensor", inner, x))))
    assert [group.anchor is not None for group in plan.groups] == [True, True]


def test_two_products_that_are_added_are_one_kernel() -> None:
    builder = IRBuilder()
    x, y = builder.input("x", SHAPE), builder.input("y", SHAPE)
    a = builder.call("aten.linear.default", x, builder.weight("a", (8, 8)))
    b = builder.call("aten.linear.default", y, builder.weight("b", (8, 8)))
    assert len(plan_ir(builder.build(builder.call("aten.add.Tensor", a, b))).groups) == 1


def test_an_output_is_stored_even_where_it_could_be_fused_away() -> None:
    def build(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
        first = b.call("aten.tanh.default", x)
        return first, b.call("aten.mul.Tensor", first, y)

    plan = planned(build)
    assert len(plan.groups) == 2
    check(plan, lambda x, y: torch.tanh(x), lambda x, y: torch.tanh(x) * y)


def test_an_expensive_value_with_two_readers_is_computed_once() -> None:
    def build(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
        shared = b.call("aten.tanh.default", x)
        return b.call("aten.add.Tensor", shared, y), b.call("aten.sum.dim_IntList", shared, [0])

    plan = planned(build)
    assert len(plan.groups) == 3
    check(plan, lambda x, y: torch.tanh(x) + y, lambda x, y: torch.tanh(x).sum(0))


def test_a_cheap_value_with_two_readers_is_computed_twice() -> None:
    def build(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
        shared = b.call("aten.mul.Scalar", x, 3.0)
        return b.call("aten.add.Tensor", shared, y), b.call("aten.sum.dim_IntList", shared, [0])

    plan = planned(build)
    assert len(plan.groups) == 2
    check(plan, lambda x, y: x * 3 + y, lambda x, y: (x * 3).sum(0))


@pytest.mark.parametrize(
    "views",
    [
        [("aten.transpose.int", (0, 1))],
        [("aten.unsqueeze.default", (0,)), ("aten.expand.default", ((3, 6, 8),))],
        [("aten.slice.Tensor", (1, 2, 7, 2)), ("aten.select.int", (0, 3))],
        [("aten.reshape.default", ((2, 3, 8),)), ("aten.permute.default", ((1, 2, 0),))],
    ],
)
def test_views_cost_no_kernel(views: list[tuple[str, tuple[int, ...]]]) -> None:
    def build(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
        for op, attrs in views:
            x = b.call(op, x, *attrs)
        return (b.call("aten.relu.default", x),)

    assert len(planned(build).groups) == 1


def test_a_value_nobody_needs_is_not_computed() -> None:
    def build(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
        b.call("aten.exp.default", y)
        return (b.call("aten.relu.default", x),)

    assert len(planned(build).groups) == 1


def test_an_input_that_is_an_output_is_copied() -> None:
    plan = planned(lambda b, x, y: (x, b.call("aten.transpose.int", y, 0, 1), x))
    check(plan, lambda x, y: x, lambda x, y: y.T, lambda x, y: x)


def test_a_cache_that_becomes_an_output_is_updated_in_place() -> None:
    builder = IRBuilder()
    cache, index = builder.input("cache", (2, 6, 4)), builder.input("index", (1,), torch.int64)
    values = builder.input("values", (2, 1, 4))
    plan = plan_ir(builder.build(builder.call("aten.index_copy.default", cache, 1, index, values, name="updated")))
    assert plan.plan.state == (("updated", "cache"),)
    assert len(plan.groups) == 1


def test_a_cache_that_is_read_before_is_copied_with_a_note() -> None:
    builder = IRBuilder()
    cache, index = builder.input("cache", (2, 6, 4)), builder.input("index", (1,), torch.int64)
    updated = builder.call("aten.index_copy.default", cache, 1, index, builder.input("values", (2, 1, 4)))
    plan = plan_ir(builder.build(updated, builder.call("aten.tanh.default", cache)))
    assert plan.plan.state == ()
    assert "also read by" in plan.plan.notes[0]
