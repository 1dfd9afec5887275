"""Models of any length: nothing recurses over a chain of ops, and no walk takes a shared operand twice."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import npu_compiler
from benchmarks.compile_time import CHAINS, alternating, chain
from cuda_compiler.guards import is_uniform
from npu_compiler.dtypes import BOOL, INT64
from npu_compiler.tensor.expr import Call, Const, Expr, Iota, walk
from npu_compiler.tensor.view import View
from npu_runtime import Device
from tests.support.ir_builder import IRBuilder
from tests.support.reference_target import plan_ir
from tests.support.running import run_ir

LENGTH = 600  # nodes: well beyond what Python's stack holds
BINDINGS = 31  # buffers of a kernel on Metal, one of which holds its parameters


@pytest.mark.parametrize("target", ["metal", "cuda"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_long_chain_compiles(name: str, target: str) -> None:
    program = npu_compiler.compile(chain(name, LENGTH), target=target)
    assert npu_compiler.CompiledProgram.from_bytes(program.to_bytes()) == program
    assert program.describe()
    assert all(len(step.args) < BINDINGS for step in program.main.steps)


def test_a_chain_is_few_kernels_of_flat_text() -> None:
    plan = npu_compiler.compile(chain("x + 0.5", 1000)).main
    assert len(plan.steps) < 10
    for kernel in plan.kernels:
        depth = deepest = 0
        for bracket in re.findall(r"[(){}]", kernel.text):
            depth += 1 if bracket in "({" else -1
            deepest = max(deepest, depth)
        assert deepest < 16


def test_what_two_ways_lead_to_is_visited_once() -> None:
    """SiLU and ReLU use their operand twice: 2^N visits of a chain of N."""
    assert npu_compiler.compile(chain("relu(silu(x))", 60)).main.steps


def test_a_sum_with_its_own_transpose_does_not_double_the_work() -> None:
    builder = IRBuilder()
    x = builder.input("x", (4, 4))
    for _ in range(40):
        x = builder.call("aten.add.Tensor", x, builder.call("aten.transpose.int", x, 0, 1))
    assert len(npu_compiler.compile(builder.build(x)).main.steps) <= 40


def test_a_chain_is_divided_where_the_device_lacks_ops() -> None:
    plan = npu_compiler.partition(alternating(LENGTH))
    assert sum(len(part.nodes) for part in plan.partitions) == LENGTH


@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_a_chain_of_in_place_ops_compiles(target: str) -> None:
    builder = IRBuilder()
    x = builder.input("x", (4, 8))
    for step in range(LENGTH):
        seen = builder.call("aten.view.default", x, [8, 4]) if step % 3 == 0 else x
        changed = builder.call("aten.add_.Scalar", seen, 1.0)
        x = builder.call("aten.view.default", changed, [4, 8]) if step % 3 == 0 else changed
    assert npu_compiler.compile(builder.build(x), target=target).main.steps


def test_a_long_sum_around_two_convolutions_is_one_kernel() -> None:
    builder = IRBuilder()
    x, w = builder.input("x", (1, 4, 3, 3)), builder.weight("w", (4, 4, 1, 1))
    first, second = (builder.call("aten.conv2d.default", x, w) for _ in range(2))
    for _ in range(150):
        first = builder.call("aten.add.Scalar", first, 0.5)
    plan = plan_ir(builder.build(builder.call("aten.add.Tensor", first, second)))
    assert len(plan.groups) == 1
    given, weight = torch.linspace(-1, 1, 36).reshape(1, 4, 3, 3), torch.linspace(-1, 1, 16).reshape(4, 4, 1, 1)
    (result,) = plan.run({"x": given}, {"w": weight})
    expected = 2 * torch.conv2d(given.double(), weight.double()) + 75
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-6)


def test_a_condition_that_uses_its_parts_twice_is_visited_once() -> None:
    view = View((64,), (1,))
    condition: Expr = Call("lt", (Iota(view, INT64), Const(32, INT64)), BOOL)
    (position,) = (node for node in walk(condition) if isinstance(node, Iota))
    for _ in range(10_000):
        condition = Call("and", (condition, Call("or", (condition, condition), BOOL)), BOOL)
    assert is_uniform(condition, {position: (1,)}, axis=0, size=8)
    assert not is_uniform(condition, {position: (3,)}, axis=0, size=8)


@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_a_long_condition_around_a_cat_compiles(target: str) -> None:
    builder = IRBuilder()
    x = builder.input("x", (4, 16))
    condition = builder.call("aten.lt.Scalar", builder.call("aten.arange.default", 16, device="meta"), 8)
    for _ in range(60):
        either = builder.call("aten.logical_or.default", condition, condition)
        condition = builder.call("aten.logical_and.default", condition, either)
    joined = builder.call("aten.slice.Tensor", builder.call("aten.cat.default", [x, x], 1), 1, 8, 24)
    assert npu_compiler.compile(builder.build(builder.call("aten.where.self", condition, joined, x)), target).main.steps


@pytest.mark.parametrize("op", ["aten.add.Scalar", "aten.relu.default", "aten.cat.default"])
def test_a_chain_of_a_thousand_computes_the_same_on_the_software_gpu(op: str) -> None:
    builder = IRBuilder()
    x = builder.input("x", (4, 8))
    value = torch.linspace(-1, 1, 32).reshape(4, 8)
    result, expected = x, value.double()
    for step in range(1000 if op == "aten.add.Scalar" else 100):
        if op == "aten.add.Scalar":
            number = 0.25 if step % 2 else -0.25
            result, expected = builder.call(op, result, number), expected + number
        elif op == "aten.relu.default":
            result = builder.call(op, builder.call("aten.silu.default", result))
            expected = torch.relu(torch.nn.functional.silu(expected))
        else:
            joined = builder.call(op, [result, x], 0)
            result = builder.call("aten.slice.Tensor", joined, 0, 1, 5)
            expected = torch.cat([expected, value.double()], 0)[1:5]
    (given,) = run_ir(builder.build(result), {"x": value}, Device("software-metal"))
    np.testing.assert_allclose(given, expected.numpy(), atol=2e-2)
