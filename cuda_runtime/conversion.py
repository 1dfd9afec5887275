"""Tensors converted on the device: data type and order of dimensions, on the way in and on the way out."""

from __future__ import annotations

from functools import cache
from typing import Any

from cuda_runtime.cupy_api import cupy

__all__ = ["convert"]


def convert(source: Any, target: Any, stream: Any, overflow: Any) -> None:
    """Asks a stream to fill `target` with the values of `source`; both are CuPy arrays of one shape, of any strides.

    Args:
        source, target: Device memory, or pinned memory of the host that the device reaches.
        stream: The stream; it is the current one.
        overflow: A uint32 of shape [1], which becomes 1 where a number is too large for float16, or for an integer.
    """
    if not source.size:
        return
    if source.dtype == target.dtype and source.flags.c_contiguous and target.flags.c_contiguous:
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, source.nbytes, runtime.memcpyDefault, stream.ptr)
    elif target.dtype == "float16" and source.dtype in ("float32", "float64"):
        lost = "isinf(static_cast<float>(y)) && !isinf(x)"
        _checking(str(source.dtype), "float16", lost)(source, target, overflow)
    elif target.dtype.kind in "iu" and source.dtype.kind in "iu" and target.itemsize < source.itemsize:
        _checking(str(source.dtype), str(target.dtype), f"static_cast<{_C[str(source.dtype)]}>(y) != x")(
            source, target, overflow
        )
    else:
        target[...] = source


_C = {"int64": "long long", "uint64": "unsigned long long", "int32": "int", "uint32": "unsigned int", "int16": "short"}


@cache
def _checking(given: str, made: str, lost: str) -> Any:
    """A kernel that converts, and notes where a value is lost."""
    return cupy().ElementwiseKernel(
        f"{given} x", f"{made} y, raw uint32 overflow", f"y = x; if ({lost}) overflow[0] = 1u", f"npu_{given}_to_{made}"
    )
