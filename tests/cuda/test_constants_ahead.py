"""What does not depend on the launch ahead is asked for before its end: a norm's weights, a bias."""

from __future__ import annotations

import re

import pytest
import torch

import npu_compiler
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from tests.cuda.test_grouped_matvec import Case
from tests.support.ir_builder import IRBuilder

BFLOAT = torch.bfloat16


def texts_of(plan: ExecutionPlan) -> list[str]:
    """The kernels of the launches that a plan prefers."""
    calls = [call for step in plan.steps for call in options_of(step)[0].calls]
    return [plan.kernels[call.kernel].text for call in calls if isinstance(call, KernelCall)]


def asked_for(text: str) -> list[str]:
    """The pointers whose lines a kernel has on their way early."""
    (body,) = re.findall(r"void ask_ahead\(.*?\n}\n", text, re.DOTALL)
    return re.findall(r"ask_for\((\w+)", body)


@pytest.mark.parametrize(
    ("case", "entry", "count"),
    [
        (Case(n=2048, zeros=True, behind="norm ahead"), "integer_rows", 2),
        (Case(n=2048, zeros=True, behind="layer norm ahead"), "integer_rows", 2),
        (Case(m=8, n=2048, zeros=True, behind="norm ahead"), "few_codes", 1),
        (Case(m=2, n=2048, zeros=True, behind="norm ahead"), "grouped_matvec", 1),
    ],
    ids=str,
)
def test_weights_of_a_norm_are_on_their_way(case: Case, entry: str, count: int) -> None:
    """And one row itself, which is an input here: no kernel of the plan writes it."""
    (text,) = texts_of(case.program(BFLOAT).main)
    assert f"{entry}(\n" in text
    assert len(asked_for(text)) == count


def test_what_the_launch_ahead_writes_is_not_asked_for() -> None:
    """A row that the first product makes is normed ahead of the second, and added behind it."""
    builder = IRBuilder()
    size = 1024
    x = builder.input("x", (1, size), BFLOAT)
    for number in range(2):
        codes = builder.weight(f"codes{number}", (size, size // 2), torch.uint8)
        scales = builder.weight(f"scales{number}", (size, size // 64), BFLOAT)
        options = (4, size, 64, 1, 8, BFLOAT)
        weight = builder.call("npu_codes.dequantize.default", codes, scales, None, None, None, *options)
        normed = builder.call(
            "aten.rms_norm.default", x, [size], builder.weight(f"norm{number}", (size,), BFLOAT), 1e-6
        )
        bias = (builder.weight("bias", (size,), BFLOAT),) if number == 0 else ()
        made = builder.call("aten.linear.default", normed, weight, *bias)
        x = made if number == 0 else builder.call("aten.add.Tensor", x, made)
    first, second = texts_of(npu_compiler.compile(builder.build(x), "cuda", "bfloat16").main)
    assert "#define COLUMNS_SETTLED 1\n" in first
    assert "#define COLUMNS_SETTLED 0\n" in second
    assert (len(asked_for(first)), len(asked_for(second))) == (2, 1)
