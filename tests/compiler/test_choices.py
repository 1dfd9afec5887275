"""Choices between ways to compute a group: placed as one step, resolved to launches."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from npu_compiler.artifact.plan import (
    Argument,
    CallChoice,
    CallOption,
    ExecutionPlan,
    KernelCall,
    KernelSource,
    LibraryCall,
    Role,
)
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.target import Lowering
from npu_runtime import Device, Executor
from tests.runtime.plans import SHAPE, axpy_plan, choice_program
from tests.support.ir_builder import IRBuilder
from tests.support.reference_target import ReferenceTarget, plan_ir

_PARTS_BYTES = 4096


class _ChoosingTarget(ReferenceTarget):
    """Computes each group by two launches with scratch between them, or by the library."""

    def lower(self, group: Group, lowering: Lowering) -> list[Any]:
        (launch,) = super().lower(group, lowering)
        parts = lowering.scratch(_PARTS_BYTES)
        first = KernelCall("parts", launch.kernel, (Argument(parts, writes=True),), b"", (1, 1, 1), (1, 1, 1), flops=1)
        args = (*launch.args, Argument(parts))
        kernel = lowering.kernel(KernelSource("whole", ""))
        second = KernelCall("whole", kernel, args, b"", (2, 1, 1), (1, 1, 1), 2)
        library = LibraryCall("product", "gemm", launch.args, {}, flops=100)
        return [CallChoice((CallOption("much", (first, second)), CallOption("", (library,))))]


def planned(target: ReferenceTarget) -> ExecutionPlan:
    """Two groups, one after the other."""
    builder = IRBuilder()
    total = builder.call("aten.sum.dim_IntList", builder.input("x", SHAPE), [0])
    ir = builder.build(builder.call("aten.softmax.int", builder.call("aten.relu.default", total), -1))
    return plan_ir(ir, target).plan


@pytest.fixture(scope="module")
def plan() -> ExecutionPlan:
    return planned(_ChoosingTarget())


def test_a_choice_is_one_step_and_counts_as_its_preferred_option(plan: ExecutionPlan) -> None:
    assert len(plan.steps) == 2
    assert all(isinstance(step, CallChoice) for step in plan.steps)
    assert [call.label for call in plan.calls] == ["parts", "whole"] * 2
    assert [(step.label, step.flops, step.nbytes) for step in plan.steps] == [("parts", 3, 0)] * 2
    whole = plan.calls[1]
    assert isinstance(whole, KernelCall)
    assert whole.grid == (2, 1, 1)


def test_scratch_of_an_option_overlaps_nothing_that_the_choice_binds(plan: ExecutionPlan) -> None:
    arena = next(index for index, buffer in enumerate(plan.buffers) if buffer.role is Role.ARENA)
    for step in plan.steps:
        offsets = sorted({argument.offset for argument in step.args if argument.buffer == arena})
        assert len(offsets) == 2  # the scratch, and the tensor between the groups
        assert all(abs(a - b) >= min(_PARTS_BYTES, 10) for a, b in combinations(offsets, 2))
    assert plan.arena_bytes < 2 * _PARTS_BYTES  # the second group's scratch lies where the first's lay


def test_scratch_of_an_option_may_lie_where_that_of_another_does() -> None:
    class TwoOptions(_ChoosingTarget):
        def lower(self, group: Group, lowering: Lowering) -> list[Any]:
            (first,), (second,) = super().lower(group, lowering), super().lower(group, lowering)
            return [CallChoice((first.options[0], second.options[0], first.options[1]))]

    once, twice = planned(_ChoosingTarget()), planned(TwoOptions())
    assert twice.arena_bytes == once.arena_bytes


def test_resolving_takes_one_option_of_each_and_drops_kernels_that_nothing_launches(plan: ExecutionPlan) -> None:
    resolved = plan.resolved(lambda choice, kernels: 0 if choice is plan.steps[1] else 1)
    library, parts, whole = resolved.steps
    assert isinstance(library, LibraryCall)
    assert isinstance(parts, KernelCall)
    assert isinstance(whole, KernelCall)
    assert resolved.calls == resolved.steps
    assert len(resolved.kernels) == 2
    assert resolved.kernels[whole.kernel].entry == "whole"
    assert parts.args == plan.calls[2].args


def test_the_selection_sees_the_kernels(plan: ExecutionPlan) -> None:
    seen: list[str] = []

    def select(choice: CallChoice, kernels: Any) -> int:
        call = choice.options[0].calls[1]
        assert isinstance(call, KernelCall)
        seen.append(kernels[call.kernel].entry)
        return 0

    plan.resolved(select)
    assert seen == ["whole", "whole"]


def test_a_device_without_preferences_takes_the_option_that_any_device_runs() -> None:
    executor = Executor(choice_program(), Device("software-metal"))
    assert [step.label for step in executor.plan.steps] == ["inner", "outer"]
    assert executor.plan.kernels == axpy_plan().kernels
