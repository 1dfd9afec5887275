"""Activations that are rounded to codes: which products read the codes, and that one kernel makes codes and scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Dequantised
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering
from tests.support.byte_products import KINDS, ByteProduct
from tests.support.reference_target import Planned, ReferenceTarget, plan_ir

each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class LoadsWeights(ReferenceTarget):
    """A target whose templates read codes of one operand at a time."""

    def loads(self, group: Group, position: int, operand: Operand) -> bool:
        others = [] if group.problem is None else group.problem.operands
        one = not isinstance(operand, Dequantised) or not any(isinstance(other, Dequantised) for other in others)
        return one and super().loads(group, position, operand)


class Asked(ReferenceTarget):
    """A target that keeps what it was asked to lower."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Group] = []

    def lower(self, group: Group, lowering: Lowering) -> list[Any]:
        self.asked.append(group)
        return super().lower(group, lowering)


def planned(model: ByteProduct, m: int, target: ReferenceTarget | None = None) -> Planned:
    return plan_ir(npu_compiler.extract(model.eval(), model.inputs(m)).ir, target)


def check(plan: Planned, model: ByteProduct, m: int) -> None:
    x, residual = model.inputs(m)
    given = dict(model.state_dict())
    if model.kind.is_floating_point:
        given["codes"] = given["codes"].view(torch.uint8)
    inputs = dict(zip((spec.name for spec in plan.plan.inputs), (x, residual), strict=False))
    (result,) = plan.run(inputs, given)
    expected = model.exact(x, residual).numpy()
    difference = np.abs(result - expected)
    assert difference.mean() < 1e-3 * np.abs(expected).mean()  # but for numbers halfway between two codes


def problems(plan: Planned) -> list[Group]:
    return [group for group in plan.groups if group.problem is not None]


@each_kind
@pytest.mark.parametrize("behind", ["", "residual", "gated", "bias"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
def test_products_read_codes_of_both(kind: torch.dtype, behind: str, norm: bool) -> None:
    model = ByteProduct(24, 40, kind, torch.float16, norm, behind)
    plan = planned(model, 20)
    (product,) = problems(plan)
    assert product.problem is not None
    assert all(isinstance(operand, Dequantised) for operand in product.problem.operands)
    check(plan, model, 20)


@each_kind
def test_one_kernel_makes_codes_and_scales_of_a_norm(kind: torch.dtype) -> None:
    target = Asked()
    planned(ByteProduct(24, 40, kind, torch.float16, True, ""), 20, target)
    assert [group.beside is not None for group in target.asked] == [True, False]


@each_kind
def test_other_targets_multiply_rounded_numbers(kind: torch.dtype) -> None:
    model = ByteProduct(24, 40, kind, torch.float16, True, "residual")
    plan = planned(model, 20, LoadsWeights())
    (product,) = problems(plan)
    assert product.problem is not None
    assert not isinstance(product.problem.operands[0], Dequantised)
    check(plan, model, 20)


@each_kind
def test_linears_of_one_rounded_input_round_it_once(kind: torch.dtype) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = ByteProduct(24, 40, kind, torch.float16)
            self.second = ByteProduct(24, 40, kind, torch.float16)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x, residual), self.second(x, residual)

    model = Two().eval()
    plan = plan_ir(npu_compiler.extract(model, model.first.inputs(20)).ir)
    assert [group.nodes for group in plan.groups if "quantize" in group.nodes] == [("quantize",)] * 2  # and scales
