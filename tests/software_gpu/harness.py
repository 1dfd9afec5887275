"""Runs kernels of the software GPU on numpy arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from software_gpu import metal

Array = NDArray[Any]
KERNELS = Path(__file__).parent / "kernels"
HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"


@functools.cache
def device(kind: str) -> metal.MTLDevice:
    """A device of a kind: fast, fibers, reversed or check."""
    return metal.create_device(check=kind == "check", fibers=kind == "fibers", reversed_threads=kind == "reversed")


def read_kernels(name: str) -> str:
    """One of the sample sources."""
    return (KERNELS / f"{name}.metal").read_text()


def pipeline(source: str, kernel: str, kind: str = "fast") -> metal.MTLComputePipelineState:
    """A kernel of a source, which must compile."""
    library, error = device(kind).newLibraryWithSource_options_error_(source, None, None)
    assert library is not None, str(error)
    function = library.newFunctionWithName_(kernel)
    assert function is not None
    state, error = device(kind).newComputePipelineStateWithFunction_error_(function, None)
    assert state is not None, str(error)
    return state


def compile_error(source: str) -> str:
    """What the device says about a source it refuses."""
    library, error = device("fast").newLibraryWithSource_options_error_(source, None, None)
    assert library is None
    return str(error)


def run(
    source: str,
    kernel: str,
    arguments: Sequence[Array | bytes],
    groups: tuple[int, int, int],
    threads: tuple[int, int, int],
    *,
    kind: str = "fast",
    grid: tuple[int, int, int] | None = None,
    threadgroup_lengths: Mapping[int, int] | None = None,
) -> list[Array]:
    """Dispatches once and returns the arrays as the kernel left them; bytes go through setBytes.

    Args:
        grid: Threads in all, for dispatchThreads instead of dispatchThreadgroups.
    """
    gpu = device(kind)
    command_buffer = gpu.newCommandQueue().commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    encoder.setComputePipelineState_(pipeline(source, kernel, kind))
    buffers: list[tuple[metal.MTLBuffer, Array]] = []
    for index, argument in enumerate(arguments):
        if isinstance(argument, bytes):
            encoder.setBytes_length_atIndex_(argument, len(argument), index)
        else:
            whole = np.ascontiguousarray(argument)
            buffer = gpu.newBufferWithBytes_length_options_(whole, whole.nbytes, metal.MTLResourceStorageModeShared)
            encoder.setBuffer_offset_atIndex_(buffer, 0, index)
            buffers.append((buffer, argument))
    for index, length in (threadgroup_lengths or {}).items():
        encoder.setThreadgroupMemoryLength_atIndex_(length, index)
    if grid is None:
        encoder.dispatchThreadgroups_threadsPerThreadgroup_(groups, threads)
    else:
        encoder.dispatchThreads_threadsPerThreadgroup_(grid, threads)
    encoder.endEncoding()
    command_buffer.commit()
    command_buffer.waitUntilCompleted()
    return [
        np.frombuffer(buffer.contents().as_buffer(buffer.length()), array.dtype).reshape(array.shape).copy()
        for buffer, array in buffers
    ]


def uints(*values: int) -> bytes:
    return np.array(values, np.uint32).tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()
