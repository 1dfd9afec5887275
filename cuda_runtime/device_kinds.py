"""The devices that this package opens."""

from __future__ import annotations

from npu_runtime.device_kind import DeviceKind

__all__ = ["CUDA"]

CUDA = DeviceKind(
    "cuda",
    "cuda_runtime.backend:CUDABackend",
    preference=10,
    remedy="pip install 'npu-compiler[cuda]'",
    checkup="cuda_runtime.checkup:CHECKUP",
    tensors="cuda",
    tunes=True,
)
