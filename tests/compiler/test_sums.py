"""Anchors whose results are merely added share a kernel where the target can, and no others do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.ir_builder import IRBuilder, Value
from tests.support.reference_target import Planned, plan_ir

SHAPE = (6, 8)
Build = Callable[[IRBuilder, Value, Value], tuple[Value, ...]]
Function = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def _products(b: IRBuilder, x: Value, y: Value) -> tuple[Value, Value]:
    left = b.call("aten.mm.default", x, b.call("aten.t.default", y))
    return left, b.call("aten.mm.default", y, b.call("aten.t.default", x))


def _both_in_one(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
    left, right = _products(b, x, y)
    shifted = b.call("aten.add.Tensor", right, b.call("aten.select.int", x, 1, 0))
    return (b.call("aten.relu.default", b.call("aten.add.Tensor", left, shifted)),)


def _one_is_an_output(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
    left, right = _products(b, x, y)
    return b.call("aten.relu.default", b.call("aten.add.Tensor", left, right)), right


def _one_is_clipped(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
    left, right = _products(b, x, y)
    return (b.call("aten.add.Tensor", left, b.call("aten.relu.default", right)),)


def _one_is_read_twice(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
    left, right = _products(b, x, y)
    return (b.call("aten.mul.Tensor", b.call("aten.add.Tensor", left, right), right),)


def _one_is_turned(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
    left, right = _products(b, x, y)
    return (b.call("aten.add.Tensor", left, b.call("aten.t.default", right)),)


def _one_is_scaled(b: IRBuilder, x: Value, y: Value) -> tuple[Value, ...]:
    left, right = _products(b, x, y)
    return (b.call("aten.sub.Tensor", left, right),)


CASES: list[tuple[Build, Function, int]] = [
    (_both_in_one, lambda x, y: (torch.relu(x @ y.T + y @ x.T + x[:, 0]),), 1),
    (_one_is_an_output, lambda x, y: (torch.relu(x @ y.T + y @ x.T), y @ x.T), 2),
    (_one_is_clipped, lambda x, y: (x @ y.T + torch.relu(y @ x.T),), 2),
    (_one_is_read_twice, lambda x, y: ((x @ y.T + y @ x.T) * (y @ x.T),), 2),
    (_one_is_turned, lambda x, y: (x @ y.T + (y @ x.T).T,), 2),
    (_one_is_scaled, lambda x, y: (x @ y.T - y @ x.T,), 2),
]


@pytest.mark.parametrize(("build", "function", "kernels"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_products_share_a_kernel_only_where_they_are_added(build: Build, function: Function, kernels: int) -> None:
    builder = IRBuilder()
    x, y = builder.input("x", SHAPE), builder.input("y", SHAPE)
    plan: Planned = plan_ir(builder.build(*build(builder, x, y)))
    assert len(plan.groups) == kernels
    assert sum(group.added is not None for group in plan.groups) == (kernels == 1)
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(SHAPE, generator=generator, dtype=torch.float64) for name in ("x", "y")}
    for result, expected in zip(plan.run(given), function(given["x"], given["y"]), strict=True):
        np.testing.assert_allclose(result, expected.numpy(), rtol=1e-9, atol=1e-12)
