"""Which operands of products are codes, whatever the target; computed by the target that is numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Dequantised, GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Paired
from tests.support.coded import SPELLINGS, Coded, StoredByColumn
from tests.support.reference_target import Planned, ReferenceTarget, plan_ir


class LoadsBytes(ReferenceTarget):
    """A target whose templates load codes of a byte with one scale for a row, and none with groups."""

    def loads(self, group: Group, position: int, operand: Operand) -> bool:
        return not isinstance(operand, GroupedCodes) and super().loads(group, position, operand)


class LoadsNothing(ReferenceTarget):
    """A target whose templates read operands from memory alone; it keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Operand] = []

    def loads(self, group: Group, position: int, operand: Operand) -> bool:
        self.asked.append(operand)
        return False


def planned(spelling: str, target: ReferenceTarget | None = None) -> tuple[Planned, Coded, torch.Tensor]:
    model = SPELLINGS[spelling](12, 20, torch.float16).eval()
    depth = model.codes.shape[0 if isinstance(model, StoredByColumn) else 1]
    x = torch.randn(3, depth, generator=torch.Generator().manual_seed(0)).half()
    return plan_ir(npu_compiler.extract(model, (x,)).ir, target), model, x


def check(plan: Planned, model: Coded, x: torch.Tensor) -> None:
    """Compares with PyTorch in float64: nothing is rounded but what is stored on the way."""
    exact = {name: value if value.element_size() == 1 else value.double() for name, value in model.state_dict().items()}
    expected = torch.func.functional_call(model, exact, (x.double(),))
    given = dict(model.state_dict())
    if given["codes"].dtype == torch.float8_e4m3fn:
        given["codes"] = given["codes"].view(torch.uint8)
    (result,) = plan.run({"x": x}, given)
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_operands_are_codes_in_every_spelling(spelling: str) -> None:
    plan, model, x = planned(spelling, LoadsBytes())
    (problem,) = [group.problem for group in plan.groups if group.problem is not None]
    (codes,) = [operand for operand in problem.operands if isinstance(operand, Dequantised)]
    assert codes.dtype.size == 1
    assert (codes.scale is None) == (spelling == "ScaledBehind")
    check(plan, model, x)


@pytest.mark.parametrize("spelling", ["WithZeroPoints", "StoredByColumn", "Gated"])
def test_what_a_target_does_not_load_is_stored_first(spelling: str) -> None:
    target = LoadsNothing()
    plan, model, x = planned(spelling, target)
    assert all(type(operand) is Operand for group in plan.groups if group.problem for operand in group.problem.operands)
    assert any(isinstance(operand, Dequantised) for operand in target.asked)
    assert (spelling == "Gated") == any(isinstance(operand, Paired) for operand in target.asked)
    assert all(group.pairs == 1 for group in plan.groups)
    check(plan, model, x)


def test_two_columns_of_codes_are_combined_where_the_target_says_so() -> None:
    plan, model, x = planned("Gated", LoadsBytes())
    assert [group.pairs for group in plan.groups] == [2]
    check(plan, model, x)
