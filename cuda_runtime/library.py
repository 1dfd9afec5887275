"""Calls of the vendor's library that a plan may hold: large matrix products by cuBLAS, through CuPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuda_runtime.cupy_api import cupy
from npu_compiler.codegen.plan import LibraryCall
from npu_compiler.errors import DeviceError

__all__ = ["check_call", "launch_call"]

_KINDS = {"float16": 2, "bfloat16": 14}  # CUDA_R_16F, CUDA_R_16BF
_COMPUTE_FLOAT32 = 68  # CUBLAS_COMPUTE_32F
_DEFAULT_ALGORITHM = -1
_SIZES = ("m", "n", "k", "a_row", "b_column", "out_row")


def check_call(step: LibraryCall) -> None:
    """Checks that a call is one that `launch_call` can do.

    Raises:
        DeviceError: It is not.
    """
    known = step.routine in _ROUTINES and step.attrs.get("dtype") in _KINDS and len(step.args) == 3
    sizes = [step.attrs.get(name) for name in _SIZES]
    if not known or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise DeviceError(
            f"step '{step.label}' calls the library routine '{step.routine}' with {step.attrs}, expected one of "
            f"{', '.join(_ROUTINES)}; compile the model with this release"
        )


def launch_call(step: LibraryCall, pointers: Sequence[int], stream: Any) -> None:
    """Asks the library for a step.

    Args:
        step: One that `check_call` has passed.
        pointers: The addresses of its arguments.
        stream: CuPy's stream, which is the current one.
    """
    _ROUTINES[step.routine](step.attrs, pointers, stream)


def _matmul(attrs: dict[str, Any], pointers: Sequence[int], stream: Any) -> None:
    """``out = a @ b`` with a [m, k] and out [m, n] in rows, b [k, n] in columns; sums in float32.

    The library counts in columns: what it computes is the transpose, ``out.T = b.T @ a.T``.
    """
    cublas = cupy().cuda.cublas
    handle = cupy().cuda.device.get_cublas_handle()
    cublas.setStream(handle, stream.ptr)
    one, zero = np.array(1, np.float32), np.array(0, np.float32)
    kind = _KINDS[attrs["dtype"]]
    a, b, out = pointers
    m, n, k, a_row, b_column, out_row = (attrs[name] for name in _SIZES)
    cublas.gemmEx(
        *(handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, n, m, k, one.ctypes.data),
        *(b, kind, b_column, a, kind, a_row, zero.ctypes.data, out, kind, out_row),
        *(_COMPUTE_FLOAT32, _DEFAULT_ALGORITHM),
    )


_ROUTINES: dict[str, Callable[[dict[str, Any], Sequence[int], Any], None]] = {"matmul": _matmul}
