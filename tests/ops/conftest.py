"""The devices that every case runs on: all that a machine without a GPU has, and that of a target from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from npu_runtime import Device
from tests.support.distribution import TOY_TARGET, installed


@pytest.fixture(scope="module", params=["software-metal", "toy"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param != "toy":
        yield Device(request.param)
        return
    with installed(TOY_TARGET):
        yield Device(request.param)
