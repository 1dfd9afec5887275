"""Codes of a byte on CUDA, as weights and as data types: that kernels compile, and on a device what they compute."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import torch

import npu_compiler
from npu_compiler.dtypes import DType
from npu_runtime import Device, load
from tests.cuda.kernels import check_plan_compiles
from tests.support.coded import SIZES, SPELLINGS, Coded, check, compiled, kernels_of, weight_stays_codes
from tests.support.stored_types import (
    CODED,
    Stores,
    assert_same_codes,
    check_stores,
    every_code,
    hard_numbers,
    torch_type,
)

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
LARGE = [(1, 1536, 8960), (4, 300, 1536), (8, 1536, 320), (130, 1000, 512), (300, 2048, 1024)]
_PLAIN = "matmul_plain"


def kernel_for(spelling: str, rows: int, n: int, k: int) -> str:
    """The kernel that a product should go to."""
    if rows <= 16 and spelling not in ("Left", "StoredByColumn", "ScaledBehind", "Unsigned"):
        return "grouped_matvec"
    if spelling == "Left" or (rows <= 8 and spelling != "StoredByColumn"):
        return "matvec"
    chunked = n if spelling == "StoredByColumn" else k
    return "matmul" if chunked % 8 == 0 and k % 8 == 0 else _PLAIN


@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_codes_are_loaded_by_the_right_kernel(spelling: str, rows: int, n: int, k: int) -> None:
    program, _ = compiled(SPELLINGS[spelling](n, k, torch.float16), rows, torch.float16, "cuda")
    others = {"rows", "integer_rows"}  # a norm ahead of several rows, and what newer devices have for some sizes
    assert set(kernels_of(program.main)) - others == {kernel_for(spelling, rows, n, k)}


@BOTH
@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_copy_of_the_weight_in_16_bits_exists(spelling: str, rows: int, dtype: torch.dtype) -> None:
    model: Coded = SPELLINGS[spelling](384, 256, dtype)
    assert weight_stays_codes(compiled(model, rows, dtype, "cuda")[0].main, model.codes)


@pytest.mark.parametrize(
    ("spelling", "rows", "n", "k", "architecture"),
    [
        ("WithZeroPoints", 1, 30, 41, 70),
        ("WithZeroPoints", 70, 72, 136, 90),
        ("StoredByColumn", 70, 72, 136, 70),
        ("StoredByColumn", 19, 30, 41, 90),
        ("Normed", 1, 256, 128, 90),
        ("Gated", 3, 64, 96, 70),
        ("Floats", 5, 33, 50, 90),
        ("Left", 70, 72, 136, 90),
    ],
)
def test_kernels_compile(spelling: str, rows: int, n: int, k: int, architecture: int) -> None:
    dtype = torch.float16 if architecture == 70 else torch.bfloat16
    program, _ = compiled(SPELLINGS[spelling](n, k, dtype), rows, dtype, "cuda")
    check_plan_compiles(program.main, architecture)


@BOTH
@pytest.mark.parametrize(("rows", "n", "k"), [*SIZES, *LARGE])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_products_load_codes(spelling: str, rows: int, n: int, k: int, dtype: torch.dtype, device: Device) -> None:
    check(SPELLINGS[spelling](n, k, dtype), rows, dtype, device)


@pytest.mark.parametrize("kind", CODED, ids=str)
def test_a_stored_type_loads_computes_and_stores(kind: DType, device: Device, tmp_path: Path) -> None:
    check_stores(kind, device, tmp_path)


@pytest.mark.parametrize("kind", CODED, ids=str)
def test_tensors_of_a_stored_type_stay_on_the_device(kind: DType, device: Device) -> None:
    """What is on the device goes in and comes out as it is, codes and all."""

    class Moves(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.t().contiguous()

    codes = every_code(kind).reshape(8, 32)
    program = npu_compiler.compile(npu_compiler.extract(Moves().eval(), (codes,)), target="cuda")
    result = load(program, device=device)(codes.cuda())
    assert result.is_cuda
    assert_same_codes(result.cpu(), codes.t().contiguous())


@pytest.mark.parametrize(("kind", "architecture"), [*zip(CODED, cycle((70, 90)))], ids=str)
def test_kernels_of_a_stored_type_compile(kind: DType, architecture: int) -> None:
    inputs = torch.rand(3, 40).half(), hard_numbers(kind)[:1024], every_code(kind).reshape(16, 16)
    extraction = npu_compiler.extract(Stores(torch_type(kind)).eval(), inputs)
    check_plan_compiles(npu_compiler.compile(extraction, target="cuda").main, architecture)
