"""Which operands of products are packed codes with groups, and that the form says all of what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_compiler.frontend import coded_layers
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from tests.support.grouped_codes import numbers_of
from tests.support.ir_builder import IRBuilder, Value
from tests.support.reference_target import Planned, ReferenceTarget, plan_ir

assert coded_layers  # which defines npu_codes::dequantize


class Keeps(ReferenceTarget):
    """A target that keeps the packed codes that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, GroupedCodes]] = []

    def loads(self, group: Group, position: int, operand: Operand) -> bool:
        if isinstance(operand, GroupedCodes):
            self.asked.append((position, operand))
        return super().loads(group, position, operand)


@dataclass(frozen=True)
class Case:
    bits: int = 4
    k: int = 64
    group: int = 16
    rows: int = 1
    kind: torch.dtype = torch.uint8
    zeros: bool = False
    zero: int = 0
    biases: bool = False
    codebook: bool = False
    n: int = 12


def tensors_of(case: Case) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(case.bits + case.k)
    height, groups = ceil_div(case.n, case.rows), ceil_div(case.k, case.group)
    codes = torch.randint(0, 256, (case.n, ceil_div(case.k * case.bits, 8)), generator=random, dtype=torch.uint8)
    if case.kind == torch.float8_e4m3fn:
        codes = codes & 0x77  # no NaN
    made = {"codes": codes.view(case.kind), "scales": torch.rand((height, groups), generator=random).half()}
    if case.zeros:
        width = ceil_div(groups * case.bits, 8)
        made["zeros"] = torch.randint(0, 256, (height, width), generator=random, dtype=torch.uint8)
    if case.biases:
        made["biases"] = torch.randn((height, groups), generator=random).half()
    if case.codebook:
        made["codebook"] = torch.randn(1 << case.bits, generator=random).half().float()
    return made


def planned(case: Case, target: ReferenceTarget) -> tuple[Planned, dict[str, torch.Tensor], torch.Tensor]:
    """A linear of three rows by the weight, whose parts are inputs, so that nothing folds them; what these hold, and
    the weight in float64.
    """
    tensors = tensors_of(case)
    builder = IRBuilder()
    values = {name: builder.input(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    parts = [values.get(name) for name in ("codes", "scales", "zeros", "biases", "codebook")]
    options = (case.bits, case.k, case.group, case.rows, case.zero)
    weight = builder.call("npu_codes.dequantize.default", *parts, *options, torch.float16)
    x = builder.input("x", (3, case.k), torch.float16)
    plan = plan_ir(builder.build(builder.call("aten.linear.default", x, weight)), target)
    given: list[Any] = [tensors.get(name) for name in ("codes", "scales", "zeros", "biases", "codebook")]
    given[1] = tensors["scales"].double()
    exact = torch.ops.npu_codes.dequantize(*given, *options, torch.float64)
    memory = dict(tensors)
    if case.kind == torch.float8_e4m3fn:
        memory["codes"] = tensors["codes"].view(torch.uint8)
    return plan, memory, exact


CASES = [
    Case(bits=2, group=32),
    Case(bits=3, k=40, group=8, zeros=True),
    Case(zeros=True),
    Case(k=62, group=62, zeros=True),
    Case(biases=True),
    Case(zero=8),
    Case(codebook=True, group=64),
    Case(bits=5, k=30, group=7, biases=True),
    Case(bits=6, k=48, group=24, zeros=True, rows=4),
    Case(bits=7, k=33, group=11),
    Case(bits=8, zeros=True),
    Case(bits=8, kind=torch.int8),
    Case(bits=8, kind=torch.int8, group=64),
    Case(bits=8, kind=torch.float8_e4m3fn, rows=8, group=32),
    Case(bits=8, codebook=True),
    Case(k=8, group=3, n=1),
]


def check(case: Case) -> None:
    target = Keeps()
    plan, memory, exact = planned(case, target)
    (position, codes) = target.asked[-1]
    assert position == 1
    assert codes.bits == case.bits
    assert codes.group == (case.group if case.group < case.k else case.k)
    parts = (codes.zeros, codes.bias, codes.codebook)
    assert [part is not None for part in parts] == [case.zeros, case.biases, case.codebook]
    assert codes.zero == case.zero
    flat = {}
    for part in (codes, *codes.parts):
        name = next(name for name in memory if part.tensor.name.endswith(name))
        flat[part.tensor.index] = memory[name].numpy().reshape(-1)
    made = numbers_of(codes, 1, flat.__getitem__)
    np.testing.assert_allclose(made, exact.numpy().T, rtol=1e-6, atol=1e-6)
    (problem,) = [group.problem for group in plan.groups]
    assert problem is not None
    assert isinstance(problem.operands[1], GroupedCodes)
    x = torch.randn(3, case.k, generator=torch.Generator().manual_seed(0)).half()
    (result,) = plan.run({"x": x, **memory})
    np.testing.assert_allclose(result, (x.double() @ exact.T).numpy(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_codes_are_an_operand(case: Case) -> None:
    check(case)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Case,
        bits=st.integers(2, 8),
        k=st.integers(2, 70),
        group=st.integers(2, 70),
        rows=st.integers(1, 5),
        zeros=st.booleans(),
        biases=st.booleans(),
        codebook=st.booleans(),
        n=st.integers(1, 9),
    )
)
def test_any_bits_groups_and_sizes(case: Case) -> None:
    check(case)


def _spelled(spelling: str, codes: Value, scales: Value, zeros: Value | None) -> tuple[str, tuple[Any, ...]]:
    limits = (-8, 7, torch.int8)
    if spelling == "per_channel_group":
        op = "quantized_decomposed.dequantize_per_channel_group.default"
        return op, (codes, scales, zeros, *limits, 8, torch.float16)
    return "torchao.dequantize_affine.default", (codes, [1, 8], scales, zeros, torch.int8, -8, 7, torch.float16)


@pytest.mark.parametrize("spelling", ["per_channel_group", "affine"])
@pytest.mark.parametrize("with_zeros", [True, False])
def test_other_spellings_are_the_same_form(spelling: str, with_zeros: bool) -> None:
    if spelling == "affine":
        pytest.importorskip("torchao.quantization")
    builder, target = IRBuilder(), Keeps()
    codes, scales = builder.input("codes", (6, 32), torch.int8), builder.input("scales", (6, 4), torch.float16)
    zeros = builder.input("zeros", (6, 4), torch.int8) if with_zeros else None
    op, args = _spelled(spelling, codes, scales, zeros)
    weight = builder.call(op, *args)
    x = builder.input("x", (3, 32), torch.float16)
    plan_ir(builder.build(builder.call("aten.linear.default", x, weight)), target)
    (_, found) = target.asked[-1]
    assert (found.bits, found.number.name, found.group, found.zero_bits) == (8, "int8", 8, 8)
    assert (found.scale.shape, found.scale.strides) == ((4, 6), (1, 4))
    assert (found.zeros is None) != with_zeros
