"""Rows that nobody asks for, on CUDA: less arithmetic in no more launches, and the same result."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_compiler.artifact.plan import KernelCall
from npu_runtime import Device
from tests.support.one_row import CASES, check, check_smaller, plans


@pytest.mark.parametrize("name", CASES)
def test_there_is_less_to_compute_in_no_more_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_smaller(CASES[name], "cuda", monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str, tmp_path: Path, device: Device) -> None:
    check(CASES[name], device, tmp_path)


def test_the_last_attention_is_that_of_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = plans(CASES["many tokens"], "cuda", monkeypatch)
    found = [plan.kernels[call.kernel].entry for call in plan.calls if isinstance(call, KernelCall)]
    assert [entry for entry in found if entry.startswith("attention")][-1] == "attention_decode"
