"""The device of these tests, a CUDA GPU where there is one, and the compute capabilities that the compiler knows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from cuda_runtime.nvrtc import architectures
from npu_compiler.errors import MissingDependencyError, NPUError
from npu_runtime import Device


@cache
def _device() -> Device | NPUError:
    try:
        return Device("cuda")
    except NPUError as error:
        return error


@pytest.fixture(scope="session")
def device() -> Device:
    found = _device()
    if isinstance(found, NPUError):
        pytest.skip(f"no CUDA device: {found}")
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there is no device, one case of each test is left to say so: thousands take as long as tests that run."""
    here = Path(__file__).parent
    waiting = [item for item in items if "device" in getattr(item, "fixturenames", ()) and here in item.path.parents]
    if not waiting or isinstance(_device(), Device):
        return
    first = {(item.parent, getattr(item, "originalname", item.name)): item for item in reversed(waiting)}
    kept = {id(item) for item in first.values()}
    dropped = {id(item): item for item in waiting if id(item) not in kept}
    config.hook.pytest_deselected(items=list(dropped.values()))
    items[:] = [item for item in items if id(item) not in dropped]


@pytest.fixture(autouse=True)
def known_architecture(request: pytest.FixtureRequest) -> None:
    """Skips a test whose parameter `architecture` this machine's compiler does not know."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "architecture" not in parameters:
        return
    try:
        known = architectures()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    if parameters["architecture"] not in known:
        pytest.skip(f"this NVRTC does not compile for {parameters['architecture']}; that of CUDA 12.9 does")
