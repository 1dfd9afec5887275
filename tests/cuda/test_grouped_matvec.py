"""Products of a few rows by packed codes on CUDA: which kernel takes them, and on a device what it computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import npu_compiler
import npu_compiler.frontend.coded_layers  # defines npu_codes::dequantize
from npu_compiler import CompiledProgram
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from npu_compiler.integers import ceil_div
from npu_runtime import Device, load
from tests.cuda.kernels import check_plan_compiles
from tests.support.ir_builder import IRBuilder, Value

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def _written_norm(builder: IRBuilder, x: Value, gain: Value, dtype: torch.dtype) -> Value:
    """An RMS norm as models write it, in float32."""
    wide = builder.call("aten._to_copy.default", x, dtype=torch.float32)
    mean = builder.call("aten.mean.dim", builder.call("aten.pow.Tensor_Scalar", wide, 2), [-1], True)
    factor = builder.call("aten.rsqrt.default", builder.call("aten.add.Scalar", mean, 1e-6))
    narrow = builder.call("aten._to_copy.default", builder.call("aten.mul.Tensor", wide, factor), dtype=dtype)
    return builder.call("aten.mul.Tensor", gain, narrow)


@dataclass(frozen=True)
class Case:
    """A linear of `m` rows by a weight [n, k] in codes; `groups` to a row."""

    m: int = 1
    n: int = 320
    k: int = 1536
    bits: int = 4
    group: int = 64
    kind: torch.dtype = torch.uint8
    zeros: bool = False
    zero: int = 0
    biases: bool = False
    codebook: bool = False
    rows: int = 1
    behind: str = ""

    def parts(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(self.n + self.k + self.bits)
        height, groups = ceil_div(self.n, self.rows), ceil_div(self.k, self.group)
        width = ceil_div(self.k * self.bits, 8)
        codes = torch.randint(0, 256, (self.n, width), generator=random, dtype=torch.uint8)
        if self.kind.is_floating_point:  # no NaN
            codes = codes & 0xBB if self.kind == torch.float8_e5m2 else codes & 0xF7
        scales = (torch.rand((height, groups), generator=random) + 0.5) / self.k**0.5 / 2**self.bits
        made = {"codes": codes.view(self.kind), "scales": scales.to(dtype)}
        if self.zeros:
            packed = ceil_div(groups * self.bits, 8)
            made["zeros"] = torch.randint(0, 256, (height, packed), generator=random, dtype=torch.uint8)
        if self.biases:
            made["biases"] = (torch.randn((height, groups), generator=random) / self.k**0.5).to(dtype)
        if self.codebook:
            made["codebook"] = torch.linspace(-8, 8, 1 << self.bits).pow(3) / 64
        return made

    @property
    def options(self) -> tuple[int, int, int, int, int]:
        return self.bits, self.k, self.group, self.rows, self.zero

    def program(self, dtype: torch.dtype, device: str | None = None) -> CompiledProgram:
        builder = IRBuilder()
        parts = {name: builder.weight(name, part.shape, part.dtype) for name, part in self.parts(dtype).items()}
        x = builder.input("x", (self.m, self.k), dtype)
        if self.behind == "norm ahead":
            x = builder.call("aten.rms_norm.default", x, [self.k], builder.weight("norm", (self.k,), dtype), 1e-6)
        if self.behind == "written norm ahead":
            x = _written_norm(builder, x, builder.weight("norm", (self.k,), dtype), dtype)
        if self.behind == "layer norm ahead":
            x = builder.call(
                "aten.layer_norm.default", x, [self.k], builder.weight("norm", (self.k,), dtype), None, 1e-6
            )
        named = [parts.get(name) for name in ("codes", "scales", "zeros", "biases", "codebook")]
        weight = builder.call("npu_codes.dequantize.default", *named, *self.options, dtype)
        bias = (builder.weight("bias", (self.n,), dtype),) if self.behind == "bias" else ()
        result = builder.call("aten.linear.default", x, weight, *bias)
        if self.behind == "residual":
            result = builder.call("aten.add.Tensor", builder.input("y", (self.m, self.n), dtype), result)
        if self.behind == "gated":
            even, odd = (builder.call("aten.slice.Tensor", result, -1, side, self.n, 2) for side in (0, 1))
            result = builder.call("aten.mul.Tensor", builder.call("aten.silu.default", even), odd)
        return npu_compiler.compile(builder.build(result), "cuda", str(dtype).removeprefix("torch."), device=device)

    def exact(self, parts: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, norm: torch.Tensor) -> Any:
        given: list[Any] = [parts.get(name) for name in ("codes", "scales", "zeros", "biases", "codebook")]
        given[1] = given[1].double()
        weight = torch.ops.npu_codes.dequantize(*given, *self.options, torch.float64)
        x = x.double()
        if self.behind in ("norm ahead", "written norm ahead"):
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.double()
        if self.behind == "layer norm ahead":
            x = torch.nn.functional.layer_norm(x, (self.k,), norm.double(), None, 1e-6)
        result = x @ weight.T
        if self.behind in ("residual", "bias"):
            result = (y if self.behind == "residual" else y[:1]).double() + result
        if self.behind == "gated":
            result = torch.nn.functional.silu(result[:, ::2]) * result[:, 1::2]
        return result, weight


CASES = [
    Case(zeros=True),
    Case(m=8, zeros=True),
    Case(m=2, group=32, zero=8),
    Case(m=3, group=32, zeros=True, n=17),
    Case(m=8, group=32, zero=8),
    Case(m=16, group=128, zeros=True, n=48),
    Case(m=16, group=32, zeros=True, n=48),
    Case(m=5, group=1536, zero=8),
    Case(k=8960, n=1536, zeros=True, behind="residual"),
    Case(m=8, k=8960, n=64, zeros=True),
    Case(codebook=True),
    Case(m=4, codebook=True, group=128),
    Case(biases=True),
    Case(m=7, biases=True, group=1536),
    Case(zeros=True, behind="norm ahead"),
    Case(zeros=True, behind="layer norm ahead"),
    Case(m=8, zeros=True, behind="norm ahead"),
    Case(m=3, k=100, n=50, group=32, zeros=True, behind="norm ahead"),
    Case(m=5, bits=8, kind=torch.int8, group=1536, n=1540, behind="norm ahead"),
    Case(zeros=True, behind="bias"),
    Case(m=8, zero=8, behind="bias", n=4272),
    Case(zeros=True, behind="gated"),
    Case(m=4, zeros=True, behind="gated", n=34),
    Case(bits=8, kind=torch.int8, group=1536),
    Case(m=8, bits=8, kind=torch.int8, group=128),
    Case(m=2, bits=8, kind=torch.int8, group=32, behind="residual"),
    Case(bits=8, zero=128, group=128),
    Case(m=3, bits=8, zeros=True, group=64),
    Case(bits=8, kind=torch.float8_e4m3fn, group=1536),
    Case(m=6, bits=8, kind=torch.float8_e4m3fn, group=128, rows=128, n=256),
    Case(m=2, bits=8, kind=torch.float8_e5m2, group=1536),
    Case(bits=2, group=64, zeros=True),
    Case(m=4, bits=3, group=64, zeros=True),
    Case(bits=5, group=32, biases=True),
    Case(m=2, bits=6, group=128, zero=32),
    Case(bits=7, group=128, zeros=True),
    Case(k=96, n=33, group=32, zeros=True),
    Case(m=2, k=100, n=50, group=32, zeros=True),
    Case(m=3, k=30, n=19, group=30, bits=3, zeros=True),
    Case(k=77, n=19, group=77, bits=8, kind=torch.int8),
    Case(m=9, k=160, n=40, group=16, zero=8),
]


def calls_on_any_device(plan: ExecutionPlan) -> list[KernelCall]:
    """The launches that need no option of newer devices."""
    return [call for step in plan.steps for call in options_of(step)[-1].calls if isinstance(call, KernelCall)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_kernel_takes_the_codes(case: Case) -> None:
    plan = case.program(torch.bfloat16).main
    (call,) = calls_on_any_device(plan)
    assert plan.kernels[call.kernel].entry == "grouped_matvec"
    assert not plan.notes


@pytest.mark.parametrize(
    "case",
    [
        Case(group=24, k=96),  # neither a part nor a multiple of what four lanes read
        Case(group=4, k=64),
        Case(m=65, group=16),
        Case(bits=8, codebook=True, group=64),
    ],
    ids=str,
)
def test_other_forms_are_numbers_before_they_are_read(case: Case) -> None:
    plan = case.program(torch.bfloat16).main
    assert "grouped_matvec" not in {kernel.entry for kernel in plan.kernels}
    assert any("stored as numbers" in note for note in plan.notes)


@settings(max_examples=25, deadline=None)
@given(
    st.builds(
        Case,
        m=st.integers(1, 16),
        n=st.integers(1, 70),
        k=st.integers(64, 600),
        bits=st.integers(2, 8),
        group=st.sampled_from([16, 32, 64, 128, 256, 1000]),
        zeros=st.booleans(),
        rows=st.integers(1, 3),
    )
)
def test_any_bits_rows_and_sizes_are_taken(case: Case) -> None:
    if case.group < case.k or case.k % 2:
        case = replace(case, k=case.k // 8 * 8)
    plan = case.program(torch.float16).main
    (call,) = calls_on_any_device(plan)
    assert plan.kernels[call.kernel].entry == "grouped_matvec"
    assert 0 < call.shared_bytes <= 160 * 1024


@pytest.mark.parametrize(("at", "architecture"), [(at, (70, 80, 90)[at % 3]) for at in range(0, len(CASES), 2)])
def test_kernels_compile(at: int, architecture: int) -> None:
    dtype = torch.float16 if architecture == 70 or at % 4 == 0 else torch.bfloat16
    check_plan_compiles(CASES[at].program(dtype).main, architecture)


@cache
def inputs_of(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(7)
    x, y = (torch.randn(case.m, size, generator=random).to(dtype) for size in (case.k, case.n))
    return x, y, (torch.rand(case.k, generator=random) + 0.5).to(dtype)


def errors(case: Case, dtype: torch.dtype, device: Device) -> tuple[float, float]:
    """The relative error of the kernel, and of a product of the weight rounded to 16 bits, rounded."""
    parts, (x, y, norm) = case.parts(dtype), inputs_of(case, dtype)
    exact, weight = case.exact(parts, x, y, norm)
    inputs = {"x": x} | ({"y": y} if case.behind == "residual" else {})
    weights = {**parts, **({"norm": norm} if case.behind.endswith("norm ahead") else {})}
    weights |= {"bias": y[0]} if case.behind == "bias" else {}
    result = torch.as_tensor(load(case.program(dtype), weights, device)(**inputs)).double().cpu()
    plain = (
        (x.double() @ weight.to(dtype).double().T).to(dtype).double() if not case.behind else exact.to(dtype).double()
    )
    norm_of = exact.norm()
    return float((result - exact).norm() / norm_of), float((plain - exact).norm() / norm_of)


@HALVES
@pytest.mark.parametrize("case", CASES, ids=str)
def test_error_is_that_of_the_16_bit_product(case: Case, dtype: torch.dtype, device: Device) -> None:
    given, plain = errors(case, dtype, device)
    assert given <= (3.0 if case.behind or case.codebook else 1.2) * plain + 1e-6
