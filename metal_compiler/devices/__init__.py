"""The GPUs that programs are compiled for: their facts, and the constants of the kernels' costs.

A file is what `npu_compiler.lowering.device_model` says. The instruction ``simdgroup_matrices`` multiplies 8 x 8
matrices by the 32 threads of a simdgroup.
"""

from __future__ import annotations

from npu_compiler.lowering.device_model import DeviceModels

__all__ = ["DEVICES"]

DEVICES = DeviceModels("metal_compiler.devices", default="apple_m1_max")
