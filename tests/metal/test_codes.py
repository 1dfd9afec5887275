"""Weights in codes of a byte on the Metal kernels, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

from npu_runtime import Device
from tests.support.coded import CASES, SPELLINGS, Coded, check, compiled, kernels_of, weight_stays_codes

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@pytest.mark.parametrize(("spelling", "rows", "n", "k"), sorted({*CASES}))
def test_products_load_codes(spelling: str, rows: int, n: int, k: int) -> None:
    dtype = torch.float16 if (rows + k) % 2 else torch.bfloat16
    check(SPELLINGS[spelling](n, k, dtype), rows, dtype, Device("software-metal"))


@BOTH
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_copy_of_the_weight_in_16_bits_exists(spelling: str, rows: int, dtype: torch.dtype) -> None:
    model: Coded = SPELLINGS[spelling](384, 256, dtype)
    program, _ = compiled(model, rows, dtype, "metal")
    assert weight_stays_codes(program.main, model.codes)
    vector = "matvec_columns" if spelling == "StoredByColumn" else "matvec"
    expected = vector if rows == 1 or spelling == "Left" else "matmul"
    assert kernels_of(program.main)[-1] == expected


def test_a_norm_ahead_of_codes_is_computed_in_the_same_launch() -> None:
    program, _ = compiled(SPELLINGS["Normed"](384, 256, torch.float16), 1, torch.float16, "metal")
    assert kernels_of(program.main) == ["matvec"]
