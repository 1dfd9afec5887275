"""Ops between codes and numbers, streams of bits, and quantised checkpoints on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runtime import Device
from tests.quantised import test_decoders, test_quantising, test_spellings


@pytest.mark.parametrize("name", test_spellings.SPELLINGS)
def test_equals_torch(name: str, device: Device) -> None:
    test_spellings.test_equals_torch(name, device)


@pytest.mark.parametrize("shapes", test_spellings.PACKED, ids=str)
@pytest.mark.parametrize("zeros", [True, False])
def test_streams_of_bits_are_read(shapes: dict[str, Any], zeros: bool, device: Device) -> None:
    test_spellings.test_streams_of_bits_are_read(shapes, zeros, device)


@pytest.mark.parametrize("name", test_decoders.FORMATS)
def test_a_checkpoint_becomes_a_model(name: str, tmp_path: Path, device: Device) -> None:
    test_decoders.test_a_checkpoint_becomes_a_model(name, tmp_path, device)


def test_a_tied_head_of_8_bits(tmp_path: Path, device: Device) -> None:
    test_quantising.test_a_tied_head_of_8_bits_on_a_device(tmp_path, device)
