"""Runs the compiler within limits: of a kernel that a stranger wrote, no template or macro takes the machine's time,
memory or disk."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import BinaryIO

from npu_compiler.errors import KernelCompileError

__all__ = ["COMPILER_LIMITS", "run_limited"]

CPU_SECONDS = 60  # a hundred times what large kernels of real models take
WALL_SECONDS = 600  # for a compiler that waits
MEMORY_BYTES = 4 << 30
FILE_BYTES = 64 << 20
FRAME_BYTES = 4 << 20  # half of a thread's stack

# What clang itself counts; and what only it sees: a variable whose value is computed when the library is loaded.
COMPILER_LIMITS = (
    *("-ftemplate-depth=64", "-fconstexpr-depth=64", "-fconstexpr-steps=100000", "-fno-crash-diagnostics"),
    *(f"-Wframe-larger-than={FRAME_BYTES}", "-Werror=frame-larger-than"),
    *("-Wglobal-constructors", "-Werror=global-constructors"),
    *("-Wzero-as-null-pointer-constant", "-Werror=zero-as-null-pointer-constant"),  # a pointer made of a number
)
# As the end of the process, or as a driver's exit status (128 and more) for the end of its child.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL})
_CHILD = re.compile(r"frontend command failed with exit code (\d+)")  # a driver may say it and give 1 itself
_CRASH = re.compile(r"^(?:PLEASE submit|Stack dump|LLVM ERROR: out of memory).*", re.MULTILINE | re.DOTALL)


def run_limited(command: Sequence[str], source: str, inherited: Sequence[int] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a command with a text as its input.

    Args:
        inherited: Open files of this process that the command reads, under the same numbers.

    Raises:
        KernelCompileError: It took longer, or wrote more, than any kernel has use for, or crashed.
        OSError: It could not be started.
    """
    with os.fdopen(os.memfd_create("output"), "rb") as output, os.fdopen(os.memfd_create("messages"), "rb") as messages:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=messages, pass_fds=inherited
        ) as process:
            _limit(process.pid)
            try:
                _hand_over(process, source.encode())
            except subprocess.TimeoutExpired:
                process.kill()
                raise _too_much(f"{WALL_SECONDS} seconds") from None
            except BaseException:
                process.kill()
                raise
        code, said, words = process.returncode, _content(output), _CRASH.sub("", _content(messages))
    child = _CHILD.search(words)
    code = code if child is None else int(child[1])
    ended_by = -code if code < 0 else code - 128
    if ended_by == signal.SIGXCPU:
        raise _too_much(f"{CPU_SECONDS} seconds of processor time")
    if ended_by == signal.SIGXFSZ:
        raise _too_much(f"{FILE_BYTES >> 20} MiB of output")
    if ended_by in _CRASHES:
        raise KernelCompileError(
            "the compiler gave up on the kernel source: a construct is nested too deep, or takes it more memory than "
            f"{MEMORY_BYTES >> 30} GiB. Divide the kernel"
        )
    return subprocess.CompletedProcess(command, code, said, words)


def _hand_over(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Writes a process's input and waits for its end.

    `Popen.communicate` with a limit of time looks for the end in steps of up to 50 ms, as long as most kernels take.

    Raises:
        TimeoutExpired: It takes too long.
    """
    stdin = process.stdin
    try:
        ending = os.fdopen(os.pidfd_open(process.pid), "rb")
    except (AttributeError, OSError):  # a Python, or a system, without
        process.communicate(data, timeout=WALL_SECONDS)
        return
    assert stdin is not None
    left, last = memoryview(data), time.monotonic() + WALL_SECONDS
    with stdin, ending:
        os.set_blocking(stdin.fileno(), False)
        waiting = select.poll()
        waiting.register(ending, select.POLLIN)
        waiting.register(stdin, select.POLLOUT)
        while ending.fileno() not in (ready := dict(waiting.poll(max(0.0, last - time.monotonic()) * 1000))):
            if not ready:
                raise subprocess.TimeoutExpired(process.args, WALL_SECONDS)
            left = _written(stdin.fileno(), left)
            if not left:
                waiting.unregister(stdin)
                stdin.close()
    process.wait()


def _written(file: int, left: memoryview) -> memoryview:
    """What is still to be written; nothing where nobody reads any further."""
    try:
        return left[os.write(file, left) :]
    except BlockingIOError:
        return left
    except BrokenPipeError:
        return left[:0]


def _limit(process: int) -> None:
    """Sets the limits, before the process has read its input."""
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, CPU_SECONDS, CPU_SECONDS + 5),  # the soft one says that it was the limit
        (resource.RLIMIT_AS, MEMORY_BYTES, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES, FILE_BYTES),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        with suppress(OSError, ValueError):  # the process is gone, or has a lower limit already
            resource.prlimit(process, kind, (soft, hard))


def _content(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _too_much(what: str) -> KernelCompileError:
    return KernelCompileError(
        f"the kernel source takes the compiler more than {what}. Divide it, or let less of it be computed by templates"
    )
