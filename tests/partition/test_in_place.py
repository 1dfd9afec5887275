"""In-place ops of a divided model: each is a pure one, whatever shares the memory that it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_ir import extract_ir

from npu_compiler import partition
from npu_compiler.errors import UnsupportedOpError
from npu_compiler.partitioner import PartitionPlan
from npu_runtime import DAGExecutor, Device
from tests.partition.mixed import check_equal, check_mixed, check_plan, run_plan_on_cpu, sides
from tests.support.extraction import Function
from tests.support.ir_builder import IRBuilder

SIZE = 32


def plan_and_compare(function: Any, **options: Any) -> PartitionPlan:
    """Partitions what pytorch-ir itself extracts, which keeps in-place ops, and runs the parts in PyTorch."""
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).half().float()
    model = Function(function)
    ir = extract_ir(model, (x.to("meta"),)).to_dict()
    plan = partition(ir, **options)
    check_plan(plan, ir)
    given = x.clone()
    results = run_plan_on_cpu(plan, {plan.inputs[0].name: given})
    expected = model(x.clone())
    expected = (expected,) if isinstance(expected, torch.Tensor) else expected
    for (name, result), wanted in zip(results.items(), expected, strict=True):
        check_equal(name, result.to(wanted.dtype).numpy(), wanted, 1e-2)
    assert torch.equal(given, x)
    return plan


def test_later_readers_read_the_result() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.special.i0e(x)
        before = y @ x
        y.mul_(0.5)
        return before, y @ x, torch.special.i0e(y)

    plan = plan_and_compare(function)
    assert sides(plan) == ["cpu", "npu", "cpu"]


def test_an_in_place_op_on_the_cpu_spares_what_the_device_still_reads() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.special.i0e(x)
        product = y @ x
        y.i0_()
        return product, torch.nan_to_num(y)

    plan_and_compare(function)


def test_a_view_that_changes_its_base_keeps_nothing_off_the_device() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        row = y[3]
        row.mul_(0.0)
        return (y @ x) @ x

    assert sides(plan_and_compare(function)) == ["npu"]


def test_a_base_that_changes_under_a_view() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        flat = y.view(-1)
        y.add_(1)
        return flat * 2

    assert sides(plan_and_compare(function)) == ["npu"]


def test_a_copy_shares_nothing() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.special.i0e(x)
        kept = y.clone()
        y.add_(1)
        return kept, y

    plan_and_compare(function)


def test_an_op_of_the_cpu_that_changes_a_part_leaves_the_rest_on_the_device() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        y[:, 3].clamp_(-1, 1).i0_()
        return torch.nan_to_num(y @ x, 0.0, 0.0, 0.0)

    plan = plan_and_compare(function, target="metal")
    on_cpu = {name for part in plan.partitions if not part.on_device for name in part.nodes}
    assert "i0_" in on_cpu
    assert not on_cpu & {"matmul", "matmul_1"}


def test_an_input_changed_through_a_view_is_returned_changed() -> None:
    builder = IRBuilder("changed")
    x = builder.input("x", (4, 4))
    builder.call("aten.zero_.default", builder.call("aten.select.int", x, 0, 1))
    plan = partition(builder.build(x))
    given = torch.rand(4, 4)
    (result,) = run_plan_on_cpu(plan, {"x": given}).values()
    expected = given.clone()
    expected[1] = 0
    torch.testing.assert_close(result.float(), expected, rtol=1e-3, atol=1e-3)


def test_a_change_of_repeated_memory_is_refused_as_by_pytorch() -> None:
    builder = IRBuilder("repeated")
    x = builder.call("aten.tanh.default", builder.input("x", (4, 1)))
    many = builder.call("aten.expand.default", x, (4, 4))
    ir = builder.build(builder.call("aten.add_.Scalar", many, 1))
    with pytest.raises(UnsupportedOpError, match="several of its elements are one place in memory; clone the tensor"):
        partition(ir)


def test_memory_that_may_be_shared_is_refused() -> None:
    """PyTorch chooses the strides of attention's result, and so whether a reshape of it is a view."""
    builder = IRBuilder("unknown")
    q = builder.input("q", (1, 2, 4, 8))
    heads = builder.call("aten.scaled_dot_product_attention.default", q, q, q)
    flat = builder.call("aten.reshape.default", heads, (1, 64))
    changed = builder.call("aten.add_.Scalar", flat, 1)
    with pytest.raises(UnsupportedOpError, match="the IR does not say whether it does; extract the model with npu_com"):
        partition(builder.build(changed, heads))
    partition(builder.build(changed))


def test_a_part_that_the_cpu_computes(device: Device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        y[:, 3] = torch.special.i0e(y[:, 0])
        return y @ x

    check_mixed(Function(function), (torch.randn(SIZE, SIZE) * 0.2,), device)


def test_a_changed_row_on_a_real_device(device: Device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        y[3].mul_(0.0)
        return (y @ x) @ x

    x = torch.randn(SIZE, SIZE) * 0.2
    plan = partition(extract_ir(Function(function), (x.to("meta"),)).to_dict())
    (result,) = DAGExecutor(plan, device).execute({plan.inputs[0].name: x.numpy()}).values()
    check_equal("result", result, function(x), 5e-3)  # type: ignore[arg-type]
