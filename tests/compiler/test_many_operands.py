"""Ops of more tensors than a kernel can bind: several kernels, each of which writes a part of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import npu_compiler
from cuda_runtime.nvrtc import architectures
from npu_compiler.errors import MissingDependencyError
from npu_compiler.lowering.value import MAX_READS
from npu_runtime import Device
from tests.cuda.kernels import check_compile, kernels_for
from tests.support.ir_builder import IRBuilder, Value
from tests.support.reference_target import plan_ir
from tests.support.running import run_ir

COUNTS = (40, 100)
BINDINGS = 31  # buffers of a kernel on Metal, one of which holds its parameters


@dataclass(frozen=True)
class Many:
    """An op of many tensors.

    Attributes:
        shape: The shape of tensor number `i`.
        build: The graph behind the tensors.
        expected: What it computes.
    """

    shape: Callable[[int], tuple[int, ...]]
    build: Callable[[IRBuilder, list[Value]], Value]
    expected: Callable[[list[torch.Tensor]], torch.Tensor]

    def ir(self, count: int) -> dict[str, object]:
        builder = IRBuilder()
        tensors = [builder.input(f"x{i}", self.shape(i)) for i in range(count)]
        return builder.build(self.build(builder, tensors))

    def inputs(self, count: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(count)
        return {f"x{i}": torch.randn(self.shape(i), generator=generator) for i in range(count)}


CASES = {
    "cat of rows": Many(
        lambda i: (i % 3 + 1, 8),
        lambda b, xs: b.call("aten.cat.default", xs, 0),
        lambda xs: torch.cat(xs, 0),
    ),
    "cat of columns": Many(
        lambda i: (3, i % 3 + 1),
        lambda b, xs: b.call("aten.cat.default", xs, -1),
        lambda xs: torch.cat(xs, -1),
    ),
    "cat of channels": Many(
        lambda i: (2, i % 3 + 2, 4, 3),
        lambda b, xs: b.call("aten.relu.default", b.call("aten.cat.default", xs, 1)),
        lambda xs: torch.relu(torch.cat(xs, 1)),
    ),
    "stack": Many(
        lambda i: (4, 6),
        lambda b, xs: b.call("aten.stack.default", xs, 1),
        lambda xs: torch.stack(xs, 1),
    ),
    "cat of empty tensors": Many(
        lambda i: (2 if i % 20 == 7 else 0, 8),
        lambda b, xs: b.call("aten.cat.default", xs, 0),
        lambda xs: torch.cat(xs, 0),
    ),
    "cat turned": Many(
        lambda i: (2, 5),
        lambda b, xs: b.call("aten.transpose.int", b.call("aten.cat.default", xs, 0), 0, 1),
        lambda xs: torch.cat(xs, 0).T,
    ),
    "pad of a cat": Many(
        lambda i: (2, 5),
        lambda b, xs: b.call("aten.constant_pad_nd.default", b.call("aten.cat.default", xs, 0), [1, 2, 3, 1], 0.5),
        lambda xs: torch.nn.functional.pad(torch.cat(xs, 0), [1, 2, 3, 1], value=0.5),
    ),
    "mean of a cat": Many(
        lambda i: (6, 2),
        lambda b, xs: b.call("aten.mean.dim", b.call("aten.cat.default", xs, 1), [-1], True),
        lambda xs: torch.cat(xs, 1).mean(-1, keepdim=True),
    ),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
each_count = pytest.mark.parametrize("count", COUNTS)


@each_count
@each_case
def test_each_kernel_reads_no_more_than_it_can_bind(case: Many, count: int) -> None:
    plan = plan_ir(case.ir(count))
    assert all(len(group.reads()) <= MAX_READS for group in plan.groups)
    inputs = case.inputs(count)
    (result,) = plan.run(inputs)
    expected = case.expected([value.double() for value in inputs.values()])
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-6)


@each_count
@each_case
def test_the_software_gpu_computes_what_torch_does(case: Many, count: int) -> None:
    inputs = case.inputs(count)
    (result,) = run_ir(case.ir(count), inputs, Device("software-metal"))
    expected = case.expected([value.double() for value in inputs.values()])
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("target", ["metal", "cuda"])
@each_case
def test_no_launch_binds_more_than_the_device_does(case: Many, target: str) -> None:
    program = npu_compiler.compile(case.ir(100), target=target)
    assert all(len(step.args) < BINDINGS for step in program.main.steps)


def test_kernels_are_as_few_as_can_be() -> None:
    case = CASES["cat of rows"]
    assert [len(plan_ir(case.ir(count)).groups) for count in (28, 29, 40, 56, 57, 100)] == [1, 2, 2, 2, 3, 4]


def test_one_tensor_many_times_is_one_kernel() -> None:
    builder = IRBuilder()
    x = builder.input("x", (2, 3))
    plan = plan_ir(builder.build(builder.call("aten.cat.default", [x] * 40, 0)))
    assert len(plan.groups) == 1


def test_convolutions_that_a_large_cat_reads_are_stored_once() -> None:
    """As in the last block of a DenseNet."""
    builder = IRBuilder()
    x, w = builder.input("x", (1, 4, 3, 3)), builder.input("w", (2, 4, 1, 1))
    parts = [builder.call("aten.conv2d.default", x, w) for _ in range(40)]
    joined = builder.call("aten.relu.default", builder.call("aten.cat.default", parts, 1))
    result = builder.call("aten.max_pool2d.default", joined, [3, 3])
    ir = builder.build(result)
    inputs = {"x": torch.linspace(-1, 2, 36).reshape(1, 4, 3, 3), "w": torch.linspace(-1, 1, 8).reshape(2, 4, 1, 1)}
    expected = torch.conv2d(inputs["x"].double(), inputs["w"].double()).relu().amax((2, 3), keepdim=True)
    expected = expected.repeat(1, 40, 1, 1)
    (result_,) = plan_ir(ir).run(inputs)
    np.testing.assert_allclose(result_, expected.numpy(), rtol=1e-6)
    (given,) = run_ir(ir, inputs, Device("software-metal"))
    np.testing.assert_allclose(given, expected.numpy(), rtol=2e-3, atol=2e-3)


@each_case
def test_kernels_for_nvidia_compile(case: Many) -> None:
    try:
        architectures()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    program = npu_compiler.compile(case.ir(40), target="cuda")
    check_compile(kernels_for(program.main, 80), 80)
