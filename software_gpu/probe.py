"""Tries the software GPU on this machine: a kernel of each storage type, and how kernels that synchronise run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import DeviceError
from software_gpu import metal
from software_gpu.cache import drop_entries, kept_descriptions
from software_gpu.library import compile_library
from software_gpu.processor import LEVELS, NATIVE, chosen_level, machine_features, missing_features

__all__ = ["check_storage_types", "instructions", "kept_fallbacks", "repair", "slow_kernels_reason"]

_SYNCHRONISING = """
#include <metal_stdlib>
using namespace metal;
kernel void probe(device float* values [[buffer(0)]], uint i [[thread_position_in_threadgroup]])
{
    threadgroup float reversed[64];
    reversed[63 - i] = values[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    values[i] = simd_sum(reversed[i]);
}
"""
_STORAGE = """
#include <metal_stdlib>
using namespace metal;
"""
_STORAGE_KERNEL = """
kernel void probe_{name}(device const {name}* x [[buffer(0)]], device {name}* y [[buffer(1)]],
                         uint i [[thread_position_in_grid]])
{{
    y[i] = {name}({wide}(x[i]) * {wide}(3) + {wide}(1));
}}
"""
_STORAGE_TYPES: Mapping[str, tuple[str, np.dtype[Any]]] = {
    "float": ("float", np.dtype(np.float32)),
    "half": ("float", np.dtype(np.float16)),
    "bfloat": ("float", np.dtype(ml_dtypes.bfloat16)),
    "char": ("int", np.dtype(np.int8)),
    "uchar": ("int", np.dtype(np.uint8)),
    "short": ("int", np.dtype(np.int16)),
    "int": ("int", np.dtype(np.int32)),
    "long": ("long", np.dtype(np.int64)),
}
_COUNT = 32
# What decides how fast kernels are, as /proc/cpuinfo spells it: vectors, fused products, conversions of halves.
_NOTABLE = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "asimd", "asimdhp", "sve", "bf16")


def slow_kernels_reason() -> str:
    """Why kernels run on fibers that have a faster form; empty where they need not.

    Raises:
        NPUError: As `compile_library` does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the answer says it
        return compile_library(_SYNCHRONISING, {}).slow_because


def check_storage_types() -> str:
    """Compiles and runs a kernel of each type that buffers hold, and compares its numbers with numpy's.

    Returns:
        The types, in MSL's names.

    Raises:
        DeviceError: The numbers are wrong, or the kernel neither compiles nor runs.
    """
    kernels = "".join(_STORAGE_KERNEL.format(name=name, wide=wide) for name, (wide, _) in _STORAGE_TYPES.items())
    device = metal.MTLCreateSystemDefaultDevice()
    library, error = device.newLibraryWithSource_options_error_(_STORAGE + kernels, None, None)
    if library is None:
        raise DeviceError(str(error))
    for name, (_, dtype) in _STORAGE_TYPES.items():
        x = np.arange(1, _COUNT + 1).astype(dtype)
        expected = (x.astype(np.float64) * 3 + 1).astype(dtype)
        result = _run(device, library, f"probe_{name}", x)
        if not np.array_equal(result, expected):
            wrong = int(np.flatnonzero(result != expected)[0])
            raise DeviceError(
                f"a kernel that computes 3x + 1 in {name} gives {result[wrong]} for {x[wrong]}, expected "
                f"{expected[wrong]}: this compiler makes wrong code. Install another one, and report it"
            )
    return ", ".join(_STORAGE_TYPES)


def _run(device: metal.MTLDevice, library: metal.MTLLibrary, name: str, x: NDArray[Any]) -> NDArray[Any]:
    function = library.newFunctionWithName_(name)
    if function is None:
        raise DeviceError(f"a compiled library lacks its kernel '{name}'; run `npu doctor --repair`")
    pipeline, error = device.newComputePipelineStateWithFunction_error_(function, None)
    if pipeline is None:
        raise DeviceError(str(error))
    buffers = [
        device.newBufferWithBytes_length_options_(array, array.nbytes, metal.MTLResourceStorageModeShared)
        for array in (x, np.zeros_like(x))
    ]
    command_buffer = device.newCommandQueue().commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    encoder.setComputePipelineState_(pipeline)
    for index, buffer in enumerate(buffers):
        encoder.setBuffer_offset_atIndex_(buffer, 0, index)
    encoder.dispatchThreads_threadsPerThreadgroup_((_COUNT, 1, 1), (_COUNT, 1, 1))
    encoder.endEncoding()
    command_buffer.commit()
    command_buffer.waitUntilCompleted()
    if command_buffer.error() is not None:
        raise DeviceError(str(command_buffer.error()))
    return np.frombuffer(buffers[1].contents().as_buffer(x.nbytes), x.dtype).copy()


def instructions() -> str:
    """The level that kernels are compiled for, and which of the instructions that matter the processor has."""
    features = machine_features()
    runs = [level.name for level in LEVELS.values() if not missing_features(level)]
    level = chosen_level()
    chosen = f"compiled for {'this processor' if level == NATIVE else level}"
    return f"{chosen}; runs {', '.join(runs)}; has {' '.join(name for name in _NOTABLE if name in features)}"


def kept_fallbacks() -> list[str]:
    """What the compiler said of each kernel in the cache whose faster form it refused."""
    return [reason for description in kept_descriptions() if (reason := _fallback_reason(description))]


def repair() -> int:
    """Deletes damaged entries of the cache, and kernels whose faster form was refused; they are compiled again when
    they are used.

    Returns:
        How many files are gone.

    Raises:
        ToolchainError: One can't be deleted.
    """
    return drop_entries(lambda description: bool(_fallback_reason(description)))


def _fallback_reason(description: bytes) -> str:
    if not description:  # the native runtime's
        return ""
    return str(json.loads(description)["slow_because"])
