"""What a package with a device of its own imports of the runtime. These names stay, wherever their modules move to."""

from __future__ import annotations

from npu_compiler.artifact.plan import CallChoice, ExecutionPlan, KernelCall, KernelSource, LibraryCall
from npu_runtime.backend import Backend, BoundPlan, DeviceBuffer, PreparedPlan, Recording, Traffic, Transfers
from npu_runtime.device_kind import DeviceKind

__all__ = ["DeviceKind", "Backend", "DeviceBuffer", "PreparedPlan", "BoundPlan", "Recording", "Traffic", "Transfers"]
__all__ += ["ExecutionPlan", "KernelCall", "KernelSource", "LibraryCall", "CallChoice"]
