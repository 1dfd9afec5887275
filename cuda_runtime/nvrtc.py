"""NVRTC, the compiler of CUDA C++, bound by ctypes: it works from the toolkit, from PyPI's package, and with no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from cuda_runtime.capability import architecture_name
from cuda_runtime.kernel_text import check_kernel_text
from cuda_runtime.toolkit import load_library
from npu_compiler.errors import KernelCompileError, MissingDependencyError

__all__ = ["OPTIONS", "architectures", "compile_kernel", "nvrtc_version"]

OPTIONS = ("--std=c++17", "--fmad=true", "-default-device", "-w")


def compile_kernel(text: str, entry: str, architecture: int, options: Sequence[str] = OPTIONS) -> bytes:
    """Machine code (a cubin) of a translation unit.

    Args:
        text: CUDA C++ that includes no header.
        entry: A kernel in it, for messages.
        architecture: Compute capability times ten, such as 90.
        options: The compiler's, beside the architecture.

    Raises:
        KernelCompileError: The text includes a file, or the compiler refused it.
        MissingDependencyError: NVRTC is not installed.
    """
    check_kernel_text(text, entry)
    library = _library()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{entry}.cu".encode(), 0, None, None))
    try:
        given = [option.encode() for option in (f"--gpu-architecture={architecture_name(architecture)}", *options)]
        array = (ctypes.c_char_p * len(given))(*given)
        if library.nvrtcCompileProgram(program, len(given), array) != 0:
            raise KernelCompileError(
                f"the CUDA compiler refused the kernel '{entry}' for compute capability "
                f"{architecture // 10}.{architecture % 10}:\n{_read(program, 'ProgramLog').decode(errors='replace')}"
            )
        return _read(program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the compiler, such as (12, 9)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@cache
def architectures() -> tuple[int, ...]:
    """The compute capabilities, times ten, that the compiler knows."""
    count = ctypes.c_int()
    _check(_library().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    values = (ctypes.c_int * count.value)()
    _check(_library().nvrtcGetSupportedArchs(values))
    return tuple(values)


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    """The log or the machine code of a program."""
    library = _library()
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw if what == "CUBIN" else buffer.value


def _check(status: int) -> None:
    if status != 0:
        library = _library()
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise KernelCompileError(f"the CUDA compiler failed: {library.nvrtcGetErrorString(status).decode()}")


@cache
def _library() -> ctypes.CDLL:
    library = load_library("nvrtc", "cuda_nvrtc")
    if library is None:
        raise MissingDependencyError(
            "CUDA kernels need NVRTC, NVIDIA's run-time compiler, which is not installed: pip install "
            "'npu-compiler[cuda]' and either a CUDA toolkit or pip install nvidia-cuda-nvrtc-cu12"
        )
    return library
