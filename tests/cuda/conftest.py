"""The device of these tests, a CUDA GPU where there is one, and the compute capabilities that the compiler knows."""

from __future__ import annotations

import pytest

from cuda_runtime.nvrtc import architectures
from npu_compiler.errors import MissingDependencyError, NPUError
from npu_runtime import Device
from tests.cuda.kernels import remember_in


@pytest.fixture(scope="session")
def device() -> Device:
    try:
        return Device("cuda")
    except NPUError as error:
        pytest.skip(f"no CUDA device: {error}")


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    """No kernel is compiled twice in a session, whichever of its processes comes first."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if hasattr(request.config, "workerinput") else own  # of pytest-xdist's workers
    remember_in(shared / "compiled_kernels")


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
