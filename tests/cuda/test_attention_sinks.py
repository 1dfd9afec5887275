"""Attention with sinks on a CUDA device: decoding, prefill and what lies between."""

from __future__ import annotations

import pytest

from npu_runtime import Device
from tests.ops.test_attention_sinks import SIZES, Sizes, check


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_torch(sizes: Sizes, device: Device) -> None:
    check(sizes, "cuda")
