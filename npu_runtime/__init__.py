"""The online half: loads weights, runs compiled programs, measures them.

Knows no op and no kernel by name: a program carries its kernels, and the runtime replays its steps.
"""

from npu_runtime.backend import Backend, DeviceBuffer
from npu_runtime.buffer import NPUBuffer
from npu_runtime.dag_executor import DAGExecutor
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.generator import Generator
from npu_runtime.metal_backend import MetalBackend
from npu_runtime.model import Model, load
from npu_runtime.weight_loader import Weights, load_weights

__all__ = [
    "Backend",
    "DAGExecutor",
    "Device",
    "DeviceBuffer",
    "Executor",
    "Generator",
    "MetalBackend",
    "Model",
    "NPUBuffer",
    "Weights",
    "load",
    "load_weights",
]
