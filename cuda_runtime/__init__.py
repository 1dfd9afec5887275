"""CUDA devices: memory and streams by CuPy, kernels by NVRTC, a function as one captured graph.

Importing this needs neither; opening a device does.
"""

from cuda_runtime.backend import CUDABackend
from cuda_runtime.device import CUDABuffer
from cuda_runtime.executor import CUDAExecutor
from cuda_runtime.tensor import CUDATensor

__all__ = ["CUDABackend", "CUDABuffer", "CUDAExecutor", "CUDATensor"]
