"""Rows that nobody asks for, on Metal: less arithmetic in no more launches, and the same result."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_runtime import Device
from tests.support.one_row import CASES, check, check_smaller


@pytest.mark.parametrize("name", CASES)
def test_there_is_less_to_compute_in_no_more_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_smaller(CASES[name], "metal", monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name: str, tmp_path: Path) -> None:
    check(CASES[name], Device("software-metal"), tmp_path)
