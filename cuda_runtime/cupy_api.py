"""CuPy, imported when a device is opened and not before."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from npu_compiler.errors import DeviceError, MissingDependencyError

__all__ = ["MINIMUM_CAPABILITY", "cupy", "open_device"]

MINIMUM_CAPABILITY = 70
_MINIMUM_DRIVER = 12000


@cache
def cupy() -> Any:
    """The module.

    Raises:
        MissingDependencyError: It is not installed, or does not load.
    """
    try:
        import_module("cupy.cuda")  # which a mere folder of the name has not
        import cupy as module
    except ImportError as error:
        raise MissingDependencyError(
            f"CUDA devices need CuPy, which does not import here ({error}): pip install 'npu-compiler[cuda]', or "
            "'npu-compiler[cuda13]' for CUDA 13"
        ) from error
    return module


def open_device(ordinal: int) -> tuple[str, int]:
    """Name and compute capability, times ten, of a device.

    Raises:
        DeviceError: There is no such device, its driver is too old, or it is below compute capability 7.0.
        MissingDependencyError: CuPy is not installed.
    """
    runtime = cupy().cuda.runtime
    try:
        driver, count = runtime.driverGetVersion(), runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(
            f"this machine has no NVIDIA GPU that works ({error}); Device() takes the best device there is"
        ) from error
    if driver < _MINIMUM_DRIVER:
        raise DeviceError(
            f"the NVIDIA driver knows CUDA {driver // 1000}.{driver % 1000 // 10}, expected 12.0 or newer; update it"
        )
    if ordinal >= count:
        raise DeviceError(f"given the device 'cuda:{ordinal}', this machine has {count}, counted from cuda:0")
    properties = runtime.getDeviceProperties(ordinal)
    name, capability = properties["name"].decode(), 10 * properties["major"] + properties["minor"]
    if capability < MINIMUM_CAPABILITY:
        raise DeviceError(
            f"{name} has compute capability {capability // 10}.{capability % 10}, expected 7.0 or higher; use another "
            "device, such as Device('software-metal')"
        )
    return name, capability
