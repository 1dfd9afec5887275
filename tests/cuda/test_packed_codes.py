"""Kernels that make numbers of packed codes compile for CUDA, on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

import npu_compiler
import npu_compiler.frontend.coded_layers  # defines npu_codes::dequantize
from cuda_runtime.nvrtc import architectures
from npu_compiler.errors import MissingDependencyError
from tests.cuda.kernels import check_compile, kernels_for
from tests.support.ir_builder import IRBuilder

_ARCHITECTURE = 80


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        architectures()
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("bits", "group", "has_codebook"), [(3, 48, False), (4, 32, False), (4, 64, True), (6, 16, False)]
)
def test_packed_codes_ahead_of_a_product(bits: int, group: int, has_codebook: bool) -> None:
    builder = IRBuilder()
    columns, groups = 192, 192 // group
    codes = builder.weight("codes", (40, columns * bits // 8), torch.uint8)
    scales = builder.weight("scales", (40, groups), torch.bfloat16)
    biases = None if has_codebook else builder.weight("biases", (40, groups), torch.bfloat16)
    codebook = builder.weight("codebook", (1 << bits,), torch.float32) if has_codebook else None
    options = (bits, columns, group, 1, 0, torch.bfloat16)
    weight = builder.call("npu_codes.dequantize.default", codes, scales, None, biases, codebook, *options)
    x = builder.input("x", (5, columns), torch.bfloat16)
    plan = npu_compiler.compile(builder.build(builder.call("aten.linear.default", x, weight)), target="cuda").main
    check_compile(kernels_for(plan, _ARCHITECTURE), _ARCHITECTURE)
