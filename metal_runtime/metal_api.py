"""The two implementations of Metal: Apple's, through pyobjc, and the software GPU, which has the same names."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from npu_compiler.errors import DeviceError

__all__ = ["MetalApi", "apple_metal", "software_metal"]


@dataclass(frozen=True)
class MetalApi:
    """An implementation of Metal.

    Attributes:
        module: Has the names of pyobjc's `Metal`.
        device: The MTLDevice to use.
        pool: Makes a context that frees, when left, what Metal made inside it.
        record: Makes of a command buffer what can be run again and again on other buffers (`software_gpu.commands`);
            None where Metal has no such thing.
    """

    module: Any
    device: Any
    pool: Callable[[], AbstractContextManager[Any]]
    record: Callable[..., Any] | None = None


def apple_metal() -> MetalApi:
    """The Apple GPU of this machine.

    Raises:
        DeviceError: There is none.
        ModuleNotFoundError: pyobjc's Metal is not installed.
    """
    if platform.system() != "Darwin":
        raise DeviceError(
            f"Device('metal') needs an Apple GPU, this machine runs {platform.system()}; Device('software-metal') runs "
            "the same kernels on the CPU"
        )
    module, objc = import_module("Metal"), import_module("objc")
    device = module.MTLCreateSystemDefaultDevice()
    if device is None:
        raise DeviceError(
            "Device('metal') found no GPU, as in a virtual machine without one; Device('software-metal') runs the same "
            "kernels on the CPU"
        )
    return MetalApi(module, device, objc.autorelease_pool)


def software_metal() -> MetalApi:
    """The software GPU.

    Raises:
        ToolchainError: This machine has no compiler for its kernels.
    """
    module = import_module("software_gpu.metal")
    record = import_module("software_gpu.commands").record
    return MetalApi(module, module.MTLCreateSystemDefaultDevice(), nullcontext, record)
