"""Calls of the vendor's library that a plan may hold: large matrix products by cuBLASLt.

CuPy refuses to call cuBLAS while a graph is being captured, so that the few functions are bound here by ctypes.
"""

from __future__ import annotations

import ctypes
import reprlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import cast

from cuda_compiler.artifact.vocabulary import LIBRARY_MATMUL
from cuda_runtime.cupy_api import cupy
from cuda_runtime.toolkit import load_library
from npu_compiler.artifact.plan import Buffer, LibraryCall
from npu_compiler.errors import DeviceError, MissingDependencyError

__all__ = ["Library", "check_call", "is_installed"]

_KINDS = {"float16": 2, "bfloat16": 14}  # CUDA_R_16F, CUDA_R_16BF
_ELEMENT_BYTES = 2
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68  # CUDA_R_32F, CUBLAS_COMPUTE_32F
_TRANSPOSE_A, _TRANSPOSED = 3, 1  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T
_EPILOGUE, _BIAS = 7, 4  # CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS
_BIAS_POINTER = 8  # CUBLASLT_MATMUL_DESC_BIAS_POINTER
_MAX_WORKSPACE = 1  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
_SIZES = ("m", "n", "k", "a_row", "b_column", "out_row")
_WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends for 9.0; a stream runs in order, so that graphs share it


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an opaque algorithm first."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Product:
    """One product as the library knows it: its operands' layouts, and the algorithm that it takes.

    The library counts in columns: what it computes is the transpose, ``out.T = b.T @ a.T + addend.T``.
    """

    def __init__(self, handle: ctypes.c_void_p, step: LibraryCall, bias: int) -> None:
        m, n, k, a_row, b_column, out_row = (int(str(step.attrs[name])) for name in _SIZES)
        self._kind = _KINDS[str(step.attrs["dtype"])]
        self._what = f"step '{step.label}'"
        self.operation = ctypes.c_void_p()
        self._ask("cublasLtMatmulDescCreate", ctypes.byref(self.operation), _COMPUTE_FLOAT32, _FLOAT32)
        self._set(_TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        if bias:
            self._set(_EPILOGUE, ctypes.c_uint32(_BIAS))
            self.place_bias(bias)
        addend_row = int(str(step.attrs.get("addend_row", out_row)))
        self.layouts = [self._layout(k, n, b_column), self._layout(k, m, a_row)]
        self.layouts += [self._layout(n, m, addend_row), self._layout(n, m, out_row)]
        self.algorithm = self._chosen(handle)

    def __del__(self) -> None:
        for layout in getattr(self, "layouts", ()):
            _cublas().cublasLtMatrixLayoutDestroy(layout)
        if getattr(self, "operation", None):
            _cublas().cublasLtMatmulDescDestroy(self.operation)

    def place_bias(self, address: int) -> None:
        """Says where the bias of the next call lies."""
        self._set(_BIAS_POINTER, ctypes.c_void_p(address))

    def _set(self, attribute: int, value: ctypes.c_int32 | ctypes.c_uint32 | ctypes.c_void_p) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._ask("cublasLtMatmulDescSetAttribute", self.operation, attribute, ctypes.byref(value), size)

    def _layout(self, rows: int, columns: int, leading: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(leading)
        self._ask("cublasLtMatrixLayoutCreate", ctypes.byref(layout), self._kind, *sizes)
        return layout

    def _chosen(self, handle: ctypes.c_void_p) -> _Algorithm:
        """The algorithm that the library's heuristic puts first."""
        preference, limit = ctypes.c_void_p(), ctypes.c_size_t(_WORKSPACE_BYTES)
        found, count = _Algorithm(), ctypes.c_int()
        self._ask("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        try:
            value = (ctypes.byref(limit), ctypes.c_size_t(ctypes.sizeof(limit)))
            self._ask("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, *value)
            asked = (preference, 1, ctypes.byref(found), ctypes.byref(count))
            self._ask("cublasLtMatmulAlgoGetHeuristic", handle, self.operation, *self.layouts, *asked)
        finally:
            _cublas().cublasLtMatmulPreferenceDestroy(preference)
        if count.value == 0 or found.status != 0:
            raise DeviceError(f"cuBLAS has no algorithm for {self._what}; compile the model with this release")
        return found

    def _ask(self, function: str, *arguments: object) -> None:
        _check(getattr(_cublas(), function)(*arguments), self._what)


class Library:
    """The library on one device and stream."""

    def __init__(self, stream: int) -> None:
        """Opens it; the device must be the current one.

        Raises:
            MissingDependencyError: cuBLAS is not installed.
            DeviceError: It does not start.
        """
        self._handle, self._stream = ctypes.c_void_p(), ctypes.c_void_p(stream)
        _check(_cublas().cublasLtCreate(ctypes.byref(self._handle)), "starting")
        self._workspace = cupy().cuda.alloc(_WORKSPACE_BYTES)
        self._products: dict[tuple[object, ...], _Product] = {}

    def launch(self, step: LibraryCall, pointers: Sequence[int]) -> None:
        """Asks for a step: ``out = a @ b + addend``, sums in float32.

        a is [m, k] and out [m, n], both in rows; b [k, n] in columns. The addend, where there is one, is [m, n] in
        rows, or a bias [n].

        Args:
            step: One that `check_call` passes.
            pointers: The addresses of a, b, the addend or bias where there is one, and out.

        Raises:
            DeviceError: The library refused it.
        """
        bias = pointers[2] if "bias" in step.attrs else 0
        product = self._product(step, bias)
        if bias:
            product.place_bias(bias)
        a, b, out = (ctypes.c_void_p(pointer) for pointer in (*pointers[:2], pointers[-1]))
        addend = ctypes.c_void_p(pointers[-2]) if "addend_row" in step.attrs else None
        one, share = ctypes.c_float(1), ctypes.c_float(0 if addend is None else 1)
        a_layout, b_layout, addend_layout, out_layout = product.layouts
        status = _cublas().cublasLtMatmul(
            *(self._handle, product.operation, ctypes.byref(one), b, a_layout, a, b_layout),
            *(ctypes.byref(share), addend or out, addend_layout, out, out_layout),
            *(ctypes.byref(product.algorithm), ctypes.c_void_p(self._workspace.ptr)),
            *(ctypes.c_size_t(_WORKSPACE_BYTES), self._stream),
        )
        _check(status, f"step '{step.label}'")

    def _product(self, step: LibraryCall, bias: int) -> _Product:
        """What describes a step, made once for all that differ in addresses alone: the heuristic takes its time."""
        key = (*(step.attrs.get(name) for name in (*_SIZES, "dtype", "addend_row")), bias != 0)
        if key not in self._products:
            self._products[key] = _Product(self._handle, step, bias)
        return self._products[key]


def is_installed() -> bool:
    """Whether this machine has the library."""
    return _loaded() is not None


def check_call(step: LibraryCall, buffers: Sequence[Buffer]) -> None:
    """Checks that a call is one that `Library` can do, and stays within the buffers that it binds.

    Args:
        step: The call.
        buffers: Those of its plan.

    Raises:
        DeviceError: It is not, or does not.
    """
    added = [name for name in ("addend_row", "bias") if name in step.attrs]
    sizes = {name: step.attrs.get(name) for name in (*_SIZES, *added)}
    known = step.routine == LIBRARY_MATMUL and str(step.attrs.get("dtype")) in _KINDS
    known &= len(added) <= 1 and len(step.args) == 3 + len(added)
    if not known or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes.values()):
        raise DeviceError(
            f"step '{step.label}' calls the library routine '{step.routine}' with {reprlib.repr(step.attrs)}, expected "
            f"'{LIBRARY_MATMUL}' of {', '.join(_KINDS)}; compile the model with this release"
        )
    matrices = _matrices(cast(dict[str, int], sizes))
    for argument, (lines, length, stride) in zip(step.args, matrices, strict=True):
        end = argument.offset + _ELEMENT_BYTES * ((lines - 1) * stride + length)
        if stride < length or end > buffers[argument.buffer].nbytes or argument.writes != (argument is step.args[-1]):
            raise DeviceError(
                f"step '{step.label}' gives the library a matrix of {lines} lines of {length} elements, {stride} apart,"
                f" at byte {argument.offset} of {buffers[argument.buffer].nbytes}, expected one that lies there, and "
                "only the last to be written; compile the model again"
            )


def _matrices(size: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """For each operand of a call how many lines without gaps it has, their elements, and how far apart they begin."""
    m, n, k = (size[name] for name in ("m", "n", "k"))
    found = [(m, k, size["a_row"]), (n, k, size["b_column"])]
    found += [(m, n, size["addend_row"])] if "addend_row" in size else [(1, n, n)] if "bias" in size else []
    return [*found, (m, n, size["out_row"])]


def _check(status: int, what: str) -> None:
    if status != 0:
        raise DeviceError(f"cuBLAS refused {what} (status {status}); see `npu doctor`")


@cache
def _loaded() -> ctypes.CDLL | None:
    return load_library("cublasLt", "cublas")


def _cublas() -> ctypes.CDLL:
    library = _loaded()
    if library is None:
        raise MissingDependencyError(
            "large matrix products need cuBLAS, which is not installed: install a CUDA toolkit, or "
            "pip install nvidia-cublas-cu12"
        )
    return library
