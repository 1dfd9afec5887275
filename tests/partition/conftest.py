"""The device that mixed models run on: the software GPU, which every machine has."""

from __future__ import annotations

import pytest

from npu_runtime import Device


@pytest.fixture(scope="session")
def device() -> Device:
    return Device("software-metal")
