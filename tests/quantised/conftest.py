"""The device on which quantised models run."""

from __future__ import annotations

import pytest

from npu_runtime import Device


@pytest.fixture(scope="session")
def device() -> Device:
    return Device("software-metal")
