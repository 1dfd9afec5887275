"""The online half: loads weights, runs compiled programs, measures them.

Knows no op and no kernel by name: a program carries its kernels, and the runtime replays its steps. It compiles
nothing; what does both stands on it, and is found here under the names that users know.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from npu_runtime.backend import Backend, DeviceBuffer
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.weight_loader import Weights, load_weights

if TYPE_CHECKING:
    from npu_model import DAGExecutor, Model, load
    from npu_text.generator import Generator

__all__ = [
    "Backend",
    "DAGExecutor",
    "Device",
    "DeviceBuffer",
    "Executor",
    "Generator",
    "Model",
    "NPUBuffer",
    "Weights",
    "load",
    "load_weights",
]

_FORWARDED = {"DAGExecutor": "npu_model", "Generator": "npu_text", "Model": "npu_model", "load": "npu_model"}


def __getattr__(name: str) -> Any:
    """What is found only when it is asked for, for it builds on this package: the layers above, `MetalBackend`, ..."""
    if name in _FORWARDED:
        return getattr(import_module(_FORWARDED[name]), name)
    if name.endswith("Backend"):
        from npu_runtime.device import backend_class

        return backend_class(name)
    raise AttributeError(f"module 'npu_runtime' has no attribute '{name}'")
