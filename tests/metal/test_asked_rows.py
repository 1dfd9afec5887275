"""Rows that nobody asks for, on Metal: less arithmetic in no more launches, and the same result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import npu_compiler
import npu_runtime
from npu_compiler.errors import InputError
from npu_runtime import Device
from tests.support.one_row import CASES, check, check_smaller


@pytest.mark.parametrize("name", CASES)
def test_there_is_less_to_compute_in_no_more_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_smaller(CASES[name], "metal", monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str, tmp_path: Path) -> None:
    check(CASES[name], Device("software-metal"), tmp_path)


class _LastButOne(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.relu(self.first(x)))
        return hidden[row]


def test_rows_by_index_count_from_the_end() -> None:
    torch.manual_seed(0)
    module, x = _LastButOne().eval(), torch.randn(48, 64)
    extraction = npu_compiler.extract(module, {"x": x, "row": torch.tensor([0])})
    model = npu_runtime.load(extraction, device="software-metal")
    for row in (-2, -48, 47):
        with torch.no_grad():
            expected = module(x, torch.tensor([row]))
        torch.testing.assert_close(model(x=x, row=torch.tensor([row])), expected, rtol=0, atol=2e-2)
    for row in (-49, 48):
        with pytest.raises(InputError, match=f"given the index {row} at position"):
            model(x=x, row=torch.tensor([row]))
