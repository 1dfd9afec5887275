"""Mutated weight files: only `WeightError` comes out of the loader."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_compiler.errors import WeightError
from npu_runtime import Device, load_weights
from tests.runtime.plans import SHAPE, axpy_program

HEADER: dict[str, Any] = {
    "layer.weight": {"dtype": "F32", "shape": list(SHAPE), "data_offsets": [0, 80]},
    "other": {"dtype": "I64", "shape": [2], "data_offsets": [80, 96]},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "F16", "BF16", "I64", "", "Q4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights") / "w.safetensors"


def _load(path: Path, device: Device, header: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(96))
    with suppress(WeightError):
        load_weights(path, axpy_program(), device)


@given(st.data())
def test_a_header_with_random_bytes(path: Path, device: Device, data: st.DataObject) -> None:
    header = bytearray(json.dumps(HEADER).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    _load(path, device, bytes(header))


@given(st.sampled_from(["dtype", "shape", "data_offsets"]), VALUES)
def test_a_header_with_another_value(path: Path, device: Device, key: str, value: Any) -> None:
    entry = {**HEADER["layer.weight"], key: value}
    _load(path, device, json.dumps({**HEADER, "layer.weight": entry}).encode())
