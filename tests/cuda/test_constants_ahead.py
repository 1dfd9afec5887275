"""What does not depend on the launch ahead is asked for before its end: a norm's weights, a bias."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import npu_compiler
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from tests.cuda.test_grouped_matvec import Case
from tests.support.host_kernels import HAS_COMPILER, run_plan_on_host
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
        (Case(m=2, n=2048, zeros=True, behind="norm ahead"), "few_codes", 1),
        (Case(m=2, n=2048, bits=6, group=128, zero=32, behind="norm ahead"), "grouped_matvec", 1),
    ],
    ids=str,
)
def test_weights_of_a_norm_are_on_their_way(case: Case, entry: str, count: int) -> None:
    """And one row itself, which is an input here: no kernel of the plan writes it."""
    (text,) = texts_of(case.program(BFLOAT).main)
    assert f"{entry}(\n" in text
    assert len(asked_for(text)) == count


SIZE, GROUP, OPTIONS = 512, 64, (4, 512, 64, 1, 8)


def two_layers(rows: int) -> ExecutionPlan:
    """Rows that the first product makes are normed ahead of the second, and the first of them is added behind it."""
    builder = IRBuilder()
    x = builder.input("x", (rows, SIZE), BFLOAT)
    for number in range(2):
        codes = builder.weight(f"codes{number}", (SIZE, SIZE // 2), torch.uint8)
        scales = builder.weight(f"scales{number}", (SIZE, SIZE // GROUP), BFLOAT)
        weight = builder.call("npu_codes.dequantize.default", codes, scales, None, None, None, *OPTIONS, BFLOAT)
        norm = builder.weight(f"norm{number}", (SIZE,), BFLOAT)
        normed = builder.call("aten.rms_norm.default", x, [SIZE], norm, 1e-6)
        bias = (builder.weight("bias", (SIZE,), BFLOAT),) if number == 0 else ()
        made = builder.call("aten.linear.default", normed, weight, *bias)
        x = builder.call("aten.add.Tensor", builder.call("aten.slice.Tensor", x, 0, 0, 1), made) if number else made
    return npu_compiler.compile(builder.build(x), "cuda", "bfloat16").main.resolved(lambda choice, kernels: 0)


@pytest.mark.parametrize("rows", [1, 8])
def test_what_the_launch_ahead_writes_is_not_asked_for(rows: int) -> None:
    first, second = texts_of(two_layers(rows))
    assert "#define COLUMNS_SETTLED 1\n" in first
    assert "#define COLUMNS_SETTLED 0\n" in second
    assert (len(asked_for(first)), len(asked_for(second))) == (2 if rows == 1 else 1, 1)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("rows", [1, 8])
def test_both_layers_equal_torch(rows: int, tmp_path: Path) -> None:
    plan, random = two_layers(rows), torch.Generator().manual_seed(3)
    given = {"x": torch.randn(rows, SIZE, generator=random), "bias": torch.randn(SIZE, generator=random)}
    for number in range(2):
        scales = (torch.rand(SIZE, SIZE // GROUP, generator=random) + 0.5) / 128
        given |= {f"scales{number}": scales, f"norm{number}": torch.rand(SIZE, generator=random) + 0.5}
    given = {name: tensor.to(BFLOAT) for name, tensor in given.items()}
    codes = {
        f"codes{number}": torch.randint(0, 256, (SIZE, SIZE // 2), generator=random, dtype=torch.uint8)
        for number in range(2)
    }
    named = {name if name == "x" else f"p_{name}": tensor for name, tensor in (given | codes).items()}
    tensors = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in named.items()}
    found = torch.from_numpy(run_plan_on_host(plan, tensors, tmp_path)[plan.outputs[0].name].copy()).view(BFLOAT)
    x, numbers = given["x"].double(), {name: tensor.double() for name, tensor in given.items()}
    for number in range(2):
        parts = codes[f"codes{number}"], numbers[f"scales{number}"], None, None, None
        weight = torch.ops.npu_codes.dequantize(*parts, *OPTIONS, torch.float64)
        normed = torch.nn.functional.rms_norm(x, (SIZE,), numbers[f"norm{number}"], 1e-6)
        x = normed @ weight.T + (x[:1] if number else numbers["bias"])
    assert float((found.double().reshape(x.shape) - x).norm() / x.norm()) < 2.0**-7
