"""The native thread pool: its structures, mirrored, and the one call that runs a list of commands."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from npu_compiler.errors import OutOfMemoryError
from software_gpu.cache import load_or_build
from software_gpu.toolchain import PACKAGE_ROOT, find_toolchain

__all__ = [
    "MANY_THREADS",
    "BUFFER_SLOTS",
    "CommandKind",
    "CommandRecord",
    "DispatchRecord",
    "Failure",
    "FailureKind",
    "run_commands",
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


class _FailureReport(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint),
        ("line", ctypes.c_uint),
        ("other_line", ctypes.c_uint),
        ("thread", ctypes.c_uint),
        ("other_thread", ctypes.c_uint),
        ("address", ctypes.c_ulong),
    )


@dataclass(frozen=True)
class Failure:
    """Why a command stopped: which one, what happened, on which lines and to which threads of a group."""

    command: int
    kind: FailureKind
    line: int
    other_line: int
    thread: int
    other_thread: int
    address: int


_pool_lock = threading.Lock()


@functools.cache
def load_runtime() -> ctypes.CDLL:
    """The runtime library. Kernels find its thread-local word, so its symbols are global."""
    toolchain = find_toolchain()
    source = "".join((PACKAGE_ROOT / "native" / name).read_text() for name in ("runtime.cpp", "checker.cpp"))
    key = hashlib.sha256(f"runtime\0{toolchain.fingerprint}\0{source}".encode()).hexdigest()

    def build(path: Path) -> bytes:
        toolchain.build(source, path)
        return b""

    path, _ = load_or_build(key, build)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.msl_pool_create.restype = ctypes.c_void_p
    library.msl_pool_create.argtypes = [ctypes.c_uint]
    library.msl_pool_run.restype = ctypes.c_ulong
    library.msl_pool_run.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_void_p,
    ]
    return library


@functools.cache
def _pool() -> int:
    workers = len(os.sched_getaffinity(0))
    pool: int | None = load_runtime().msl_pool_create(workers)
    if pool is None:
        raise OutOfMemoryError(f"no memory for {workers} workers of the software GPU; free some and try again")
    return pool


def run_commands(
    commands: Sequence[CommandRecord], *, reversed_threads: bool = False, checked: bool = False
) -> Failure | None:
    """Runs commands in order, without the interpreter's lock.

    Args:
        reversed_threads: Run the threads of each group on fibers last to first.
        checked: Kernels report their accesses; races and accesses out of bounds are failures.
    """
    records = (CommandRecord * len(commands))(*commands)
    report = _FailureReport()
    with _pool_lock:
        run = load_runtime().msl_pool_run
        done = run(_pool(), records, len(commands), reversed_threads, checked, ctypes.byref(report))
    if done == len(commands):
        return None
    return Failure(
        done,
        FailureKind(report.kind),
        report.line,
        report.other_line,
        report.thread,
        report.other_thread,
        report.address,
    )
