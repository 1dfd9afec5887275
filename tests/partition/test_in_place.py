"""In-place ops of a divided model: pure where that is possible, one chain on the CPU where memory is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_ir import extract_ir

from npu_compiler import partition
from npu_compiler.errors import IRError
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
    assert not any(part.chained for part in plan.partitions)


def test_an_in_place_op_on_the_cpu_spares_what_the_device_still_reads() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.special.i0e(x)
        product = y @ x
        y.erfinv_()
        return product, torch.nan_to_num(y)

    plan_and_compare(function)


def test_a_view_that_changes_its_base_makes_a_chain() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        row = y[3]
        row.mul_(0.0)
        return (y @ x) @ x

    plan = plan_and_compare(function)
    assert sides(plan) == ["cpu", "npu"]
    chained = plan.partitions[0]
    assert chained.chained == {"mul_"}
    assert chained.reasons["matmul"] == "'mul_' (aten.mul_.Tensor) changes memory in place that this node shares"


def test_a_base_that_changes_under_a_view_makes_a_chain() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        flat = y.view(-1)
        y.add_(1)
        return flat * 2

    assert plan_and_compare(function).partitions[0].chained == {"add_"}


def test_a_copy_shares_nothing() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.special.i0e(x)
        kept = y.clone()
        y.add_(1)
        return kept, y

    assert not any(part.chained for part in plan_and_compare(function).partitions)


def test_two_chains_stay_apart() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        y[0].mul_(0.0)
        return y * 1.0

    plan = plan_and_compare(lambda x: change(torch.tanh(change(x) @ x)))
    assert sum(len(part.chained) for part in plan.partitions) == 2
    assert "npu" in sides(plan)


def test_an_input_changed_through_a_view_and_returned_is_refused() -> None:
    builder = IRBuilder("changed")
    x = builder.input("x", (4, 4))
    builder.call("aten.zero_.default", builder.call("aten.select.int", x, 0, 1))
    with pytest.raises(
        IRError, match=r"the output 'x' is an input or a weight that .* changes in place through a view"
    ):
        partition(builder.build(x))


def test_the_extraction_leaves_no_chain(device: Device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        y[:, 3] = torch.special.i0e(y[:, 0])
        return y @ x

    plan = check_mixed(Function(function), (torch.randn(SIZE, SIZE) * 0.2,), device)
    assert not any(part.chained for part in plan.partitions)


def test_a_chain_on_a_real_device(device: Device) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        y[3].mul_(0.0)
        return (y @ x) @ x

    x = torch.randn(SIZE, SIZE) * 0.2
    plan = partition(extract_ir(Function(function), (x.to("meta"),)).to_dict())
    (result,) = DAGExecutor(plan, device).execute({plan.inputs[0].name: x.numpy()}).values()
    check_equal("result", result, function(x), 5e-3)  # type: ignore[arg-type]
