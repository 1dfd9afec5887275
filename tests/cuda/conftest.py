"""The device of these tests: a CUDA GPU where there is one."""

from __future__ import annotations

import pytest

from npu_compiler.errors import NPUError
from npu_runtime import Device


@pytest.fixture(scope="session")
def device() -> Device:
    try:
        return Device("cuda")
    except NPUError as error:
        pytest.skip(f"no CUDA device: {error}")
