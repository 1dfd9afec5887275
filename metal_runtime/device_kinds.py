"""The devices that this package opens."""

from __future__ import annotations

from npu_runtime.device_kind import DeviceKind

__all__ = ["METAL", "SOFTWARE_METAL"]

_BACKEND = "metal_runtime.backend:MetalBackend"
_REMEDY = "install npu-compiler again"

METAL = DeviceKind("metal", _BACKEND, preference=20, remedy=_REMEDY)
SOFTWARE_METAL = DeviceKind("metal", _BACKEND, preference=0, remedy=_REMEDY, checkup="metal_runtime.checkup:CHECKUP")
