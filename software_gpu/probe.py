"""Tries how kernels that synchronise run on this machine."""

from __future__ import annotations

import warnings

from software_gpu.library import compile_library

__all__ = ["slow_kernels_reason"]

_SOURCE = """
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


def slow_kernels_reason() -> str:
    """Why kernels run on fibers that have a faster form; empty where they need not.

    Raises:
        NPUError: As `compile_library` does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the answer says it
        return compile_library(_SOURCE, {}).slow_because
