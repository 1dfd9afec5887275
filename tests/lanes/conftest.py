"""The device on which the lanes of a batch choose."""

from __future__ import annotations

import pytest

from npu_runtime import Device


@pytest.fixture(scope="session")
def device() -> Device:
    return Device("software-metal")
