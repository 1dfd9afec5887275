"""Calls of the vendor's library that a plan may hold: large matrix products by cuBLAS.

CuPy refuses to call cuBLAS while a graph is being captured, so that the few functions are bound here by ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from cuda_runtime.cupy_api import cupy
from cuda_runtime.toolkit import load_library
from npu_compiler.codegen.plan import LibraryCall
from npu_compiler.errors import DeviceError, MissingDependencyError

__all__ = ["Library", "check_call"]

_KINDS = {"float16": 2, "bfloat16": 14}  # CUDA_R_16F, CUDA_R_16BF
_AS_IT_IS, _TRANSPOSED = 0, 1  # CUBLAS_OP_N, CUBLAS_OP_T
_COMPUTE_FLOAT32 = 68  # CUBLAS_COMPUTE_32F
_DEFAULT_ALGORITHM = -1
_SIZES = ("m", "n", "k", "a_row", "b_column", "out_row")
_WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends for 9.0; a stream runs in order, so that graphs share it


class Library:
    """The library on one device and stream."""

    def __init__(self, stream: int) -> None:
        """Opens it; the device must be the current one.

        Raises:
            MissingDependencyError: cuBLAS is not installed.
            DeviceError: It does not start.
        """
        self._handle = ctypes.c_void_p()
        _check(_cublas().cublasCreate_v2(ctypes.byref(self._handle)), "starting")
        self._workspace = cupy().cuda.alloc(_WORKSPACE_BYTES)
        workspace = ctypes.c_void_p(self._workspace.ptr)
        _check(_cublas().cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)), "setting the stream")
        status = _cublas().cublasSetWorkspace_v2(self._handle, workspace, ctypes.c_size_t(_WORKSPACE_BYTES))
        _check(status, "setting the workspace")

    def launch(self, step: LibraryCall, pointers: Sequence[int]) -> None:
        """Asks for a step: ``out = a @ b`` with a [m, k] and out [m, n] in rows, b [k, n] in columns; sums in float32.

        The library counts in columns: what it computes is the transpose, ``out.T = b.T @ a.T``.

        Args:
            step: One that `check_call` passes.
            pointers: The addresses of its arguments.

        Raises:
            DeviceError: The library refused it.
        """
        m, n, k, a_row, b_column, out_row = (ctypes.c_int(int(str(step.attrs[name]))) for name in _SIZES)
        kind = _KINDS[str(step.attrs["dtype"])]
        a, b, out = (ctypes.c_void_p(pointer) for pointer in pointers)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        status = _cublas().cublasGemmEx(
            *(self._handle, _TRANSPOSED, _AS_IT_IS, n, m, k, ctypes.byref(one)),
            *(b, kind, b_column, a, kind, a_row, ctypes.byref(zero), out, kind, out_row),
            *(_COMPUTE_FLOAT32, _DEFAULT_ALGORITHM),
        )
        _check(status, f"step '{step.label}'")


def check_call(step: LibraryCall) -> None:
    """Checks that a call is one that `Library` can do.

    Raises:
        DeviceError: It is not.
    """
    sizes = [step.attrs.get(name) for name in _SIZES]
    known = step.routine == "matmul" and step.attrs.get("dtype") in _KINDS and len(step.args) == 3
    if not known or not all(isinstance(size, int) and 0 < size < 1 << 31 for size in sizes):
        raise DeviceError(
            f"step '{step.label}' calls the library routine '{step.routine}' with {step.attrs}, expected 'matmul' of "
            f"{', '.join(_KINDS)}; compile the model with this release"
        )


def _check(status: int, what: str) -> None:
    if status != 0:
        raise DeviceError(f"cuBLAS refused {what} (status {status}); see `npu doctor`")


@cache
def _cublas() -> ctypes.CDLL:
    library = load_library("cublas", "cublas")
    if library is None:
        raise MissingDependencyError(
            "large matrix products need cuBLAS, which is not installed: install a CUDA toolkit, or "
            "pip install nvidia-cublas-cu12"
        )
    return library
