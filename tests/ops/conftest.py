"""The devices that every case runs on: all that a machine without a GPU has."""

from __future__ import annotations

import pytest

from npu_runtime import Device


@pytest.fixture(scope="session", params=["software-metal"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)
