"""The online half: loads weights, runs compiled programs, measures them.

Knows no op and no kernel by name: a program carries its kernels, and the runtime replays its steps.
"""

from typing import Any

from npu_runtime.backend import Backend, DeviceBuffer
from npu_runtime.buffer import NPUBuffer
from npu_runtime.dag_executor import DAGExecutor
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.generator import Generator
from npu_runtime.model import Model, load
from npu_runtime.weight_loader import Weights, load_weights

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


def __getattr__(name: str) -> Any:
    """`MetalBackend` and its like are found only when they are asked for: their packages build on this one."""
    if name.endswith("Backend"):
        from npu_runtime.device import backend_class

        return backend_class(name)
    raise AttributeError(f"module 'npu_runtime' has no attribute '{name}'")
