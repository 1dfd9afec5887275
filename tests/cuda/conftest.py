"""The device of these tests, a CUDA GPU where there is one, and the compute capabilities that the compiler knows."""

from __future__ import annotations

import pytest

from cuda_runtime.nvrtc import architectures
from npu_compiler.errors import MissingDependencyError, NPUError
from npu_runtime import Device


@pytest.fixture(scope="session")
def device() -> Device:
    try:
        return Device("cuda")
    except NPUError as error:
        pytest.skip(f"no CUDA device: {error}")


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
