"""Weights in codes of a byte on CUDA: that the kernels compile, and on a device what they compute."""

from __future__ import annotations

import pytest
import torch

from npu_runtime import Device
from tests.cuda.kernels import check_plan_compiles
from tests.support.coded import SIZES, SPELLINGS, Coded, check, compiled, kernels_of, weight_stays_codes

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
LARGE = [(1, 1536, 8960), (4, 300, 1536), (8, 1536, 320), (130, 1000, 512), (300, 2048, 1024)]
_PLAIN = "matmul_plain"


def kernel_for(spelling: str, rows: int, n: int, k: int) -> str:
    """The kernel that a product should go to."""
    if spelling == "Left" or (rows <= 8 and spelling != "StoredByColumn"):
        return "matvec"
    chunked = n if spelling == "StoredByColumn" else k
    return "matmul" if chunked % 8 == 0 and k % 8 == 0 else _PLAIN


@pytest.mark.parametrize(("rows", "n", "k"), SIZES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_codes_are_loaded_by_the_right_kernel(spelling: str, rows: int, n: int, k: int) -> None:
    program, _ = compiled(SPELLINGS[spelling](n, k, torch.float16), rows, torch.float16, "cuda")
    assert set(kernels_of(program.main)) - {"rows"} == {kernel_for(spelling, rows, n, k)}


@BOTH
@pytest.mark.parametrize("rows", [1, 8, 40])
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
