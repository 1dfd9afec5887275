"""Weights in packed codes with groups on the Metal kernels, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import npu_compiler
from npu_compiler.frontend.checkpoints.form import CodedMatrix
from npu_compiler.frontend.checkpoints.packing import pack
from npu_compiler.frontend.checkpoints.rounding import NF4
from npu_compiler.frontend.coded_layers import CodedLinear, CodedWeight
from npu_compiler.integers import ceil_div
from npu_runtime import Device, load
from tests.support.coded import kernels_of


@dataclass(frozen=True)
class Case:
    """A weight [n, k] in codes, times `rows` rows."""

    rows: int = 1
    n: int = 136
    k: int = 96
    bits: int = 4
    group: int = 32
    blocks: int = 1
    kind: Any = np.uint8
    zeros: bool = False
    zero: int = 0
    biases: bool = False
    book: bool = False

    def matrix(self, dtype: torch.dtype) -> CodedMatrix:
        random = np.random.default_rng(self.k + self.bits)
        half = ml_dtypes.bfloat16 if dtype == torch.bfloat16 else np.float16
        shape = (ceil_div(self.n, self.blocks), ceil_div(self.k, self.group))
        codes = pack(random.integers(0, 1 << self.bits, (self.n, self.k), np.uint8), self.bits)
        if np.dtype(self.kind).kind != "u" and self.kind is not np.int8:
            codes &= 0xBF  # neither NaN nor large; subnormal ones among them
        zeros = pack(random.integers(0, 1 << self.bits, shape, np.uint8), self.bits) if self.zeros else None
        return CodedMatrix(
            (self.n, self.k),
            self.bits,
            codes.view(self.kind),
            self.k,
            (random.random(shape) * 0.01 + 0.01).astype(half),
            self.group,
            rows=self.blocks,
            zero=self.zero,
            zeros=zeros,
            biases=(random.standard_normal(shape) * 0.1).astype(half) if self.biases else None,
            codebook=NF4 if self.book else None,
        )


SYMMETRIC = Case(zero=8)
FORMATS = {
    "int4": SYMMETRIC,
    "int4 with zeros": Case(zeros=True),
    "int4 with biases": Case(biases=True, group=64, k=192),
    "int4 by rows": Case(zeros=True, group=96),
    "int4 of 8960": Case(zeros=True, k=8960, group=128, n=9),
    "int4 in groups of 48": Case(zero=8, group=48),
    "nf4": Case(book=True, group=64, k=192),
    "int8": Case(bits=8, kind=np.int8, group=32),
    "int8 with zeros": Case(bits=8, zeros=True, group=32, k=160),
    "fp8": Case(bits=8, kind=ml_dtypes.float8_e4m3fn, group=32),
    "fp8 in blocks": Case(bits=8, kind=ml_dtypes.float8_e4m3fn, group=48, blocks=16, n=40),
    "half of a unit": Case(zero=8, k=80, group=16),
}


class Layer(torch.nn.Module):
    def __init__(self, case: Case, dtype: torch.dtype, after: Any = None, before: Any = None) -> None:
        super().__init__()
        self.linear = CodedLinear(CodedWeight(case.matrix(dtype), dtype))
        self.after, self.before = after, before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x if self.before is None else self.before(x))
        return made if self.after is None else self.after(made)  # type: ignore[no-any-return]


def exact(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """The weight in float64, not rounded to `dtype`."""
    weight = CodedWeight(case.matrix(dtype), torch.float64, dtype).double()
    weight.codes = CodedWeight(case.matrix(dtype), torch.float64, dtype).codes
    if weight.zeros is not None:
        weight.zeros = weight.zeros.to(torch.uint8)
    made: torch.Tensor = weight()
    return made


def inputs(case: Case, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(case.rows, case.k, generator=torch.Generator().manual_seed(1)).to(dtype)


def result(layer: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    extraction = npu_compiler.extract(layer.eval(), (x,))
    program = npu_compiler.compile(extraction, target="metal")
    made: Any = load(program, extraction.weights, Device("software-metal"))(x)
    return torch.as_tensor(made).double(), kernels_of(program.main)


def error(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((given - wanted).norm() / wanted.norm())


def measured(case: Case, dtype: torch.dtype) -> tuple[float, float, list[str]]:
    """The error of a product and that of one with 16-bit weights, or of rounding where that is more; and the kernels.

    Of few rows it is against the exact weights; of many, against those rounded once, which the tile holds.
    """
    layer, x = Layer(case, dtype), inputs(case, dtype)
    given, kernels = result(layer, x)
    weight = layer.linear.matrix().to(dtype)
    plain = torch.nn.Linear(case.k, case.n, bias=False).to(dtype)
    plain.weight.data = weight
    exactly = x.double() @ weight.double().T
    with_16_bits = error(result(plain, x)[0], exactly)
    wanted = x.double() @ exact(case, dtype).T if case.rows <= 4 else exactly
    return error(given, wanted), max(with_16_bits, error(wanted.to(dtype).double(), wanted)), kernels


NAMES = [(name, (torch.float16, torch.bfloat16)[number % 2]) for number, name in enumerate(FORMATS)]


@pytest.mark.parametrize(("name", "dtype"), NAMES)
@pytest.mark.parametrize("rows", [1, 20])
def test_no_worse_than_weights_of_16_bits(name: str, rows: int, dtype: torch.dtype) -> None:
    own, with_16_bits, kernels = measured(replace(FORMATS[name], rows=rows), dtype)
    assert kernels == ["matmul" if rows > 4 else "grouped_matvec"]
    assert own <= 1.2 * with_16_bits


@pytest.mark.parametrize("name", ["int4 with zeros", "fp8 in blocks"])
def test_a_few_rows_at_a_time(name: str) -> None:
    own, with_16_bits, kernels = measured(replace(FORMATS[name], rows=3), torch.bfloat16)
    assert kernels == ["grouped_matvec"]
    assert own <= 1.2 * with_16_bits


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def gated(pairs: torch.Tensor) -> torch.Tensor:
    return F.silu(pairs[:, ::2]) * pairs[:, 1::2]


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_what_stands_beside_is_in_the_same_launch(rows: int) -> None:
    case = replace(FORMATS["int4 with zeros"], rows=rows)
    x = inputs(case, torch.float16)
    given, kernels = result(Layer(case, torch.float16, gated, normed), x)
    assert kernels[-1] == ("matmul" if rows > 4 else "grouped_matvec")
    assert len(kernels) == (1 if rows == 1 else 2)
    wanted = gated(normed(x.double()) @ exact(case, torch.float16).T)
    torch.testing.assert_close(given, wanted, rtol=2e-3, atol=2e-3 * float(wanted.abs().max()))


def test_inputs_that_are_no_neighbours() -> None:
    case = replace(SYMMETRIC, rows=2)
    x = inputs(case, torch.float16).t().contiguous()
    given, kernels = result(Layer(case, torch.float16, before=lambda turned: turned.t()), x)
    assert kernels == ["grouped_matvec"]
    torch.testing.assert_close(given, x.double().T @ exact(case, torch.float16).T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "case",
    [Case(k=40, group=8, zeros=True), Case(bits=3, zeros=True), Case(k=36, group=36), Case(bits=6, k=64, biases=True)],
    ids=str,
)
def test_other_forms_are_stored_as_numbers_first(case: Case) -> None:
    x = inputs(case, torch.float16)
    layer = Layer(case, torch.float16)
    given, kernels = result(layer, x)
    assert kernels[-1] == "matvec"
    assert len(kernels) > 1
    wanted = x.double() @ layer.linear.matrix().double().T
    torch.testing.assert_close(given, wanted, rtol=1e-3, atol=2e-3 * float(wanted.abs().max()))


def test_codes_of_a_codebook_are_not_made_numbers_when_weights_are_loaded() -> None:
    case = replace(FORMATS["nf4"], n=512, k=512)
    coded = replace(case.matrix(torch.bfloat16), scales=np.ones((512, 8), np.float32))
    layer = CodedLinear(CodedWeight(coded, torch.bfloat16))
    program = npu_compiler.compile(npu_compiler.extract(layer.eval(), (inputs(case, torch.bfloat16),)), target="metal")
    assert kernels_of(program.main) == ["grouped_matvec"]
