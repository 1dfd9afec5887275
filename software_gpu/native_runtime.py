"""The native runtime: its structures, mirrored, and the library that host and device load."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from software_gpu.cache import load_or_build
from software_gpu.toolchain import PACKAGE_ROOT, find_toolchain

__all__ = [
    "BUFFER_SLOTS",
    "MANY_THREADS",
    "CommandKind",
    "CommandRecord",
    "DispatchRecord",
    "Failure",
    "FailureKind",
    "Header",
    "load_runtime",
    "runtime_path",
]

BUFFER_SLOTS = 31
MANY_THREADS = 0xFFFFFFFF  # reported as the other thread of a race when there are several


class CommandKind(IntEnum):
    DISPATCH = 0
    COPY = 1
    FILL = 2


class FailureKind(IntEnum):
    NONE = 0
    DIVERGENT_BARRIER = 1
    OUT_OF_BOUNDS = 2
    RACE = 3
    OUT_OF_ARRAY = 4
    STOPPED = 5  # the device's process ended, or was ended


class DispatchRecord(ctypes.Structure):
    """Mirrors msl::Dispatch."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p * BUFFER_SLOTS),
        ("buffer_bytes", ctypes.c_ulong * BUFFER_SLOTS),
        ("threadgroup_offsets", ctypes.c_uint * BUFFER_SLOTS),
        ("threadgroup_bytes", ctypes.c_uint),
        ("groups", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("grid", ctypes.c_uint * 3),
    )


class CommandRecord(ctypes.Structure):
    """Mirrors msl::Command."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("value", ctypes.c_uint),
        ("target", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("bytes", ctypes.c_ulong),
        ("dispatch", DispatchRecord),
    )


class FailureReport(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint),
        ("line", ctypes.c_uint),
        ("other_line", ctypes.c_uint),
        ("thread", ctypes.c_uint),
        ("other_thread", ctypes.c_uint),
        ("address", ctypes.c_ulong),
    )


class Header(ctypes.Structure):
    """Mirrors msl::Header. The device writes its own part, and so might kernels: the host believes none of it."""

    _fields_ = (
        ("request", ctypes.c_uint),
        ("reversed", ctypes.c_uint),
        ("checked", ctypes.c_uint),
        ("host_waits", ctypes.c_uint),
        ("count", ctypes.c_ulong),
        ("code_bytes", ctypes.c_ulong),
        ("padding", ctypes.c_ubyte * 32),
        ("reply", ctypes.c_uint),
        ("started", ctypes.c_uint),
        ("device_waits", ctypes.c_uint),
        ("seal_error", ctypes.c_uint),
        ("current", ctypes.c_ulong),
        ("progress", ctypes.c_ulong),
        ("done", ctypes.c_ulong),
        ("report", FailureReport),
        ("runtime", ctypes.c_ulong),
        ("worker_offset", ctypes.c_ulong),
        ("copy", ctypes.c_ulong),
        ("move", ctypes.c_ulong),
        ("set", ctypes.c_ulong),
    )


@dataclass(frozen=True)
class Failure:
    """Why commands stopped: which one, what happened, on which lines and to which threads of a group.

    Attributes:
        reason: In words, where the device's process stopped.
    """

    command: int
    kind: FailureKind
    line: int = 0
    other_line: int = 0
    thread: int = 0
    other_thread: int = 0
    address: int = 0
    reason: str = ""


def runtime_path() -> Path:
    """Where the library that this process has loaded lies; made anew when it was deleted since."""
    loaded = Path(load_runtime()._name)
    return loaded if loaded.exists() else _build_runtime()


def _build_runtime() -> Path:
    """Where the runtime library lies in the cache, built when absent."""
    toolchain = find_toolchain()
    names = ("runtime.cpp", "checker.cpp", "sandbox.cpp", "device.cpp")
    source = "".join((PACKAGE_ROOT / "native" / name).read_text() for name in names)
    key = hashlib.sha256(f"runtime\0{toolchain.fingerprint}\0{source}".encode()).hexdigest()

    def build(path: Path) -> bytes:
        toolchain.build(source, path, shared=True)
        return b""

    return load_or_build(key, build)[0]


@functools.cache
def load_runtime() -> ctypes.CDLL:
    """The host's side of the runtime library; the device's process loads it as well."""
    library = ctypes.CDLL(str(_build_runtime()))
    for function in (library.msl_device_run, library.msl_device_wait):
        function.restype = ctypes.c_bool
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.msl_device_ended.restype = None
    library.msl_device_ended.argtypes = [ctypes.c_void_p]
    return library
