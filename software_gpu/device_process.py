"""The process in which kernels run, as a GPU is a device of its own.

It begins with the first command, ends with this process, and shares nothing with it but the memory that kernels work
on: it is sealed before it runs any kernel, and from then on the system ends it where it asks for anything but to wait.
A kernel that crashes, or that never ends, ends that process; the next command begins another one on the same memory.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from npu_compiler.errors import DeviceError, KernelCompileError
from software_gpu.machine_code import C_LIBRARY_SYMBOLS, CHECKED_SYMBOLS, Image, read_image
from software_gpu.native_runtime import (
    CommandRecord,
    Failure,
    FailureKind,
    Header,
    load_runtime,
    runtime_path,
)
from software_gpu.shared_memory import CODE_BYTES, CONTROL_BYTES, SharedMemory, shared_memory
from software_gpu.toolchain import PACKAGE_ROOT

__all__ = ["isolation", "place_code", "run_commands"]

_COMMANDS_OFFSET = 4096
_COMMAND_BYTES = ctypes.sizeof(CommandRecord)
_MOST_COMMANDS = (CONTROL_BYTES - _COMMANDS_OFFSET) // _COMMAND_BYTES
_WAIT_MILLISECONDS = 100
_SECONDS_VARIABLE = "NPU_SOFTWARE_GPU_SECONDS"
_DEFAULT_SECONDS = 30.0  # for one piece of a dispatch, of 64 or more where it has so many threadgroups
_START_SECONDS = 60.0
_START_ATTEMPTS = 3  # the addresses of the shared memory may be taken there, by chance
_CAUSES = {
    signal.SIGSEGV: "a kernel touched memory that is not the device's",
    signal.SIGBUS: "a kernel touched memory that is not there, or the machine has no more",
    signal.SIGILL: "a kernel ran an instruction that this processor does not have, or a trap",
    signal.SIGTRAP: "a kernel ran a trap",
    signal.SIGFPE: "a kernel divided an integer by zero",
    signal.SIGSYS: "a kernel made a system call",
    signal.SIGKILL: "the system killed it, perhaps for want of memory",
}


class _Stopped(Exception):
    """The process is gone; the message says why."""


class _Process:
    """One process, from its start to its end.

    A thread of its own starts it and waits for it: the system ends it when that thread ends, which is when the host
    does, however it does, and its end is known at once.
    """

    def __init__(self, memory: SharedMemory, header: Header) -> None:
        self._header = header
        self.ended = threading.Event()
        self.status: int | None = None
        self.messages = ""
        started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        self._keeper = threading.Thread(target=self._keep, args=(memory, started), name="software GPU", daemon=True)
        self._keeper.start()
        process = started.get()
        if isinstance(process, OSError):
            raise DeviceError(f"the software GPU's process could not be started with '{sys.executable}': {process}")
        self._process = process

    def _keep(self, memory: SharedMemory, started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError]) -> None:
        numbers = [memory.file, memory.base, _COMMANDS_OFFSET, CONTROL_BYTES, CODE_BYTES, memory.nbytes]
        numbers += [len(os.sched_getaffinity(0)), os.getpid()]
        try:
            command = [sys.executable, "-I", "-S", str(PACKAGE_ROOT / "device_worker.py"), str(runtime_path())]
            process = subprocess.Popen(
                [*command, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[memory.file],
                env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
                process_group=0,  # Ctrl-C is for the host
            )
        except OSError as error:
            started.put(error)
            return
        started.put(process)
        with process:
            assert process.stderr is not None
            self.messages = process.stderr.read().decode(errors="replace").strip()
        self.status = process.returncode
        self.ended.set()
        load_runtime().msl_device_ended(ctypes.addressof(self._header))

    def stop(self) -> None:
        """Ends it, and waits until it has ended."""
        self._process.kill()
        self.ended.wait(_START_SECONDS)

    def forget(self) -> None:
        """It is another process's child: this one was forked."""
        self._process.returncode = 0

    def cause(self) -> str:
        """Why it ended."""
        status = self.status or 0
        if status < 0:
            number = -status
            known = _CAUSES.get(signal.Signals(number)) if number in set(signal.Signals) else None
            return known or f"signal {number}"
        return self.messages.splitlines()[-1] if self.messages else f"it ended with status {status}"


class _Device:
    """Runs commands, one list at a time, in a process that is started when there is none."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._header = Header.from_address(memory.base)
        self._process: _Process | None = None
        self._unsealed = ""  # why the system could not seal it
        self._request = 0
        self._lock = threading.Lock()
        self._images: list[tuple[int, Image]] = []
        self._addresses: dict[str, int] = {}
        self._code_lock = threading.Lock()
        self._runtime = read_image(runtime_path(), "the native runtime")
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        if self._process is not None:
            self._process.forget()
        self._process = None
        self._lock, self._code_lock = threading.Lock(), threading.Lock()

    def place_code(self, image: Image) -> int:
        """Puts a library where the device can run it; gives its address.

        Raises:
            KernelCompileError: It has variables, or needs a symbol that the native runtime has not.
        """
        if image.variables:
            found = ", ".join(image.variables)
            raise KernelCompileError(
                f"{image.what}: variables at program scope ({found}); Metal has only constants there"
            )
        missing = image.undefined() - CHECKED_SYMBOLS
        if missing:
            names = ", ".join(f"'{name}'" for name in sorted(missing))
            raise KernelCompileError(f"{image.what}: the compiled library calls {names}, which kernels may not")
        with self._code_lock:
            address = self._memory.place_code(len(image.content))
            image.write(address)
            image.link(address, self._addresses)
            self._images.append((address, image))
        return address

    def run(self, commands: ctypes.Array[CommandRecord], *, reversed_threads: bool, checked: bool) -> Failure | None:
        with self._lock:
            for start in range(0, len(commands), _MOST_COMMANDS):
                failure = self._run(commands, reversed_threads, checked, start)
                if failure is not None:
                    return failure
        return None

    def _run(self, commands: ctypes.Array[CommandRecord], reverse: bool, check: bool, start: int) -> Failure | None:
        header, count = self._header, min(len(commands) - start, _MOST_COMMANDS)
        try:
            process = self._running()
            first = ctypes.byref(commands, start * _COMMAND_BYTES)
            ctypes.memmove(self._memory.base + _COMMANDS_OFFSET, first, count * _COMMAND_BYTES)
            header.count, header.reversed, header.checked = count, reverse, check
            header.code_bytes = self._memory.code_used
            self._request = self._request % 0xFFFFFFFF + 1
            self._wait(process)
        except _Stopped as stopped:
            index = min(header.current, count - 1)
            self.stop()
            return Failure(start + index, FailureKind.STOPPED, reason=str(stopped))
        except BaseException:  # Ctrl-C: what runs is ended, and the next command begins anew
            self.stop()
            raise
        if header.done >= count:
            return None
        report = header.report
        kind = FailureKind(report.kind) if report.kind in set(FailureKind) else FailureKind.NONE
        where = (report.line, report.other_line, report.thread, report.other_thread, report.address)
        return Failure(start + header.done, kind, *where, reason="its report was overwritten")

    def _wait(self, process: _Process) -> None:
        """Posts the job and waits for its end.

        Raises:
            _Stopped: The process ended, or was ended because nothing moved for too long.
        """
        native, address = load_runtime(), self._memory.base
        if native.msl_device_run(address, self._request, _WAIT_MILLISECONDS):
            return
        limit, progress, since = _seconds(), self._header.progress, time.monotonic()
        while not process.ended.is_set():
            if native.msl_device_wait(address, self._request, _WAIT_MILLISECONDS):
                return
            now = time.monotonic()
            if self._header.progress != progress:
                progress, since = self._header.progress, now
            elif now - since > limit:
                raise _Stopped(
                    f"nothing moved for {limit:g} seconds, as in an endless loop. Where it just takes long, set "
                    f"{_SECONDS_VARIABLE} to more seconds"
                )
        raise _Stopped(process.cause())

    def _running(self) -> _Process:
        """The process, started where there is none."""
        if self._process is not None and not self._process.ended.is_set():
            return self._process
        self._memory.own()
        for _ in range(_START_ATTEMPTS):
            ctypes.memset(self._memory.base, 0, ctypes.sizeof(Header))
            self._request = 0
            self._process = process = _Process(self._memory, self._header)
            if self._has_started(process):
                self._link()
                return process
        raise DeviceError(f"the software GPU's process ended before it could run anything: {process.cause()}")

    def _has_started(self, process: _Process) -> bool:
        native, until = load_runtime(), time.monotonic() + _START_SECONDS
        while not self._header.started:
            native.msl_device_wait(self._memory.base, 1, 1)  # a pause; it answers nothing yet
            if process.ended.is_set():
                return False
            if time.monotonic() > until:
                raise DeviceError(f"the software GPU's process did not start within {_START_SECONDS:g} seconds")
        return True

    def _link(self) -> None:
        """Reads what the new process says of itself, which it can be believed as long as it has run no kernel."""
        header = self._header
        self._unsealed = os.strerror(header.seal_error) if header.seal_error else ""
        begin = header.runtime - self._runtime.symbols["msl_device_serve"]
        known = {name: begin + offset for name, offset in self._runtime.symbols.items()}
        known |= dict(zip(C_LIBRARY_SYMBOLS, (header.copy, header.move, header.set), strict=True))
        known["msl_worker"] = header.worker_offset
        with self._code_lock:
            self._addresses = known
            for address, image in self._images:
                image.link(address, known)

    def isolation(self) -> str:
        with self._lock:
            self._running()
            if not self._unsealed:
                return "in a process of its own, which the system lets do nothing but compute"
            return f"in a process of its own, but one with all system calls: no seccomp filters here ({self._unsealed})"

    def stop(self) -> None:
        """Ends the process; the next command begins another."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()


_creation = threading.Lock()  # a cache alone lets two threads make one each
os.register_at_fork(before=_creation.acquire, after_in_parent=_creation.release, after_in_child=_creation.release)


def _device() -> _Device:
    with _creation:
        return _created_device()


@functools.cache
def _created_device() -> _Device:
    return _Device(shared_memory())


def place_code(path: Path, what: str) -> tuple[Image, int]:
    """A compiled library, placed where the device can run it, and its address.

    Args:
        path: The object file.
        what: Its kernels in words, for messages.

    Raises:
        KernelCompileError: It is damaged, or asks for more than kernels have.
    """
    image = read_image(path, what)
    return image, _device().place_code(image)


def run_commands(
    commands: ctypes.Array[CommandRecord], *, reversed_threads: bool = False, checked: bool = False
) -> Failure | None:
    """Runs commands in order, in the device's process, and waits for them.

    Args:
        reversed_threads: Run the threads of each group on fibers last to first.
        checked: Kernels report their accesses; races and accesses out of bounds are failures.

    Raises:
        DeviceError: There is no such process and none can be started.
    """
    return _device().run(commands, reversed_threads=reversed_threads, checked=checked)


def isolation() -> str:
    """How kernels are kept apart from this process, in words that follow "kernels run".

    Raises:
        DeviceError: The device's process can't be started.
    """
    return _device().isolation()


def _seconds() -> float:
    given = os.environ.get(_SECONDS_VARIABLE, "")
    try:
        seconds = float(given) if given else _DEFAULT_SECONDS
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise DeviceError(f"{_SECONDS_VARIABLE} is '{given}', expected seconds, such as 30")
    return seconds
