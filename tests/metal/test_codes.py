"""Weights in codes of a byte on the Metal kernels, against PyTorch in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import npu_compiler
from npu_compiler.errors import WeightError
from npu_runtime import Device, load
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


class GroupedScales(Coded):
    """A scale for each part of a row is none for its sum: the weight is made ahead."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, k = self.codes.shape
        groups = self.codes.to(x.dtype).reshape(n, 2, k // 2) * torch.stack([self.scale, 2 * self.scale], 1)[:, :, None]
        return torch.nn.functional.linear(x, groups.reshape(n, k))


class OfBatches(Coded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.codes.reshape(2, -1, self.codes.shape[1]).transpose(1, 2)
        return torch.matmul(x[None], codes.to(x.dtype) * self.scale.reshape(2, 1, -1))


class PartOfCodes(Coded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x[:, 4:], self.codes[8:24, 4:].to(x.dtype) * self.scale[8:24, None])


class ReadTwice(Coded):
    """What is made of the codes is read by two products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.codes.to(x.dtype) * self.scale[:, None]
        return torch.cat([torch.nn.functional.linear(x, weight), torch.nn.functional.linear(x + 1, weight)])


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        (GroupedScales, {"elementwise", "shared", "matmul"}),
        (OfBatches, {"matmul"}),
        (PartOfCodes, {"matmul"}),
        (ReadTwice, {"elementwise", "matmul"}),
    ],
)
def test_codes_in_other_places(kind: type[Coded], kernels: set[str]) -> None:
    program = check(kind(40, 64, torch.float16), 10, torch.float16, Device("software-metal"))
    assert set(kernels_of(program.main)) <= kernels


def test_codes_come_from_a_weight_file(tmp_path: Path) -> None:
    model, x = SPELLINGS["WithZeroPoints"](32, 64, torch.float16).eval(), torch.randn(1, 64).half()
    npu_compiler.extract(model, (x,), tmp_path / "m.json")
    program = npu_compiler.compile(tmp_path / "m.json")
    assert "b_codes int8[32, 64], 2048 bytes = identity(codes int8[32, 64])" in program.describe()
    from_file = load(program, tmp_path / "m.safetensors", Device("software-metal"))(x)
    from_arrays = load(program, model.state_dict(), Device("software-metal"))(x)
    torch.testing.assert_close(from_file, from_arrays, rtol=0, atol=0)
    with pytest.raises(WeightError, match="'codes': given dtype int32, expected int8"):
        load(program, {**model.state_dict(), "codes": model.codes.int()}, Device("software-metal"))
