"""The device's process: what crashes or never ends there is an error here, and nothing leaves it but numbers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from npu_compiler.errors import DeviceError, KernelCompileError
from software_gpu import device_process, metal
from software_gpu.device_process import isolation, place_code, run_commands
from software_gpu.native_runtime import CommandKind, CommandRecord, Failure
from software_gpu.shared_memory import shared_memory
from software_gpu.toolchain import find_toolchain
from tests.software_gpu.harness import HEAD, device, pipeline, uints

ROOT = Path(__file__).parents[2]
SOURCE = (
    HEAD
    + """
kernel void add_one(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] += 1.0f; }
kernel void wild(device float* x [[buffer(0)]], constant uint& far [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  x[ulong(far) * 1000000000ul + i] = 1.0f;
}
kernel void endless(device uint* x [[buffer(0)]], constant uint& last [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  for (uint n = 0; n != last; n += 2) x[i] = x[i] * 7u + n;
}
kernel void divide(device int* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = x[i + 32] / x[i]; }
"""
)
Buffer = metal.MTLBuffer


def buffer(values: Sequence[float] | NDArray[np.generic]) -> Buffer:
    array = np.asarray(values, np.float32)
    return device("fast").newBufferWithBytes_length_options_(array, array.nbytes, 0)


def floats(of: Buffer) -> NDArray[np.float32]:
    return np.frombuffer(of.contents().as_buffer(of.length()), np.float32)


def commit(kernel: str, arguments: Sequence[Buffer | bytes], groups: int = 1) -> metal.MTLCommandBuffer:
    """Runs a kernel of SOURCE in groups of 32 threads, after `add_one` on the same buffer."""
    command_buffer = device("fast").newCommandQueue().commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    for name in dict.fromkeys(("add_one", kernel)):
        encoder.setComputePipelineState_(pipeline(SOURCE, name))
        for index, argument in enumerate(arguments):
            if isinstance(argument, bytes):
                encoder.setBytes_length_atIndex_(argument, len(argument), index)
            else:
                encoder.setBuffer_offset_atIndex_(argument, 0, index)
        encoder.dispatchThreadgroups_threadsPerThreadgroup_((groups, 1, 1), (32, 1, 1))
    encoder.endEncoding()
    try:
        command_buffer.commit()
    finally:
        assert command_buffer.status() != metal.MTLCommandBufferStatusNotEnqueued
    return command_buffer


def assert_works_on(x: Buffer, before: float) -> None:
    """The device runs, and the buffer still holds what it held."""
    assert (floats(x) == before).all()
    commit("add_one", [x])
    assert (floats(x) == before + 1).all()


def device_pid() -> int:
    process = device_process._device()._process
    assert process is not None
    return process._process.pid


def run_native(text: str, tmp_path: Path, flags: Sequence[str] = ()) -> Failure | None:
    """Runs `entry` of C++ that no kernel text could say, straight from the toolchain."""
    target = tmp_path / "native.so"
    find_toolchain().build(f'#include "msl.h"\n{text}', target, flags)
    image, address = place_code(target, "a test's code")
    record = CommandRecord(kind=CommandKind.DISPATCH)
    record.dispatch.entry = address + image.symbols["entry"]
    record.dispatch.groups[:] = record.dispatch.threads[:] = record.dispatch.grid[:] = (1, 1, 1)
    return run_commands((CommandRecord * 1)(record))


ENTRY = 'extern "C" MSL_EXPORT void entry(msl::Worker* w, const msl::Dispatch* d, ulong first, ulong last)'
SYSTEM_CALL = {
    "x86_64": 'long r = {}; __asm__ volatile("syscall" : "+a"(r) : "D"(1), "S"(d), "d"(1) : "rcx", "r11", "memory");',
    "aarch64": 'register long r __asm__("x8") = {}; register long a __asm__("x0") = 1; '
    'register const void* b __asm__("x1") = d; register long c __asm__("x2") = 1; '
    '__asm__ volatile("svc 0" : "+r"(a) : "r"(r), "r"(b), "r"(c) : "memory");',
}
# getpid, write, open or openat, execve, mprotect, kill
CALLS = {"x86_64": (39, 1, 2, 59, 10, 62), "aarch64": (172, 64, 56, 221, 226, 129)}
MACHINE = os.uname().machine


def test_kernels_run_sealed_in_a_process_of_their_own() -> None:
    assert isolation() == "in a process of its own, which the system lets do nothing but compute"
    status = Path(f"/proc/{device_pid()}/status").read_text()
    assert "Seccomp:\t2" in status
    assert "NoNewPrivs:\t1" in status
    assert f"PPid:\t{os.getpid()}" in status


def test_a_wild_pointer_is_an_error_and_the_device_works_again() -> None:
    x = buffer(np.zeros(32))
    with pytest.raises(DeviceError, match=r"kernel 'wild': .*process stopped: a kernel touched memory that is not"):
        commit("wild", [x, uints(0x7FFFFFFF)])
    assert_works_on(x, 1.0)


@pytest.mark.skipif(MACHINE != "x86_64", reason="other processors divide by zero without a trap")
def test_an_integer_divided_by_zero_is_an_error() -> None:
    x = buffer(np.zeros(64))
    with pytest.raises(DeviceError, match=r"kernel 'divide': .*divided an integer by zero"):
        run_one("divide", x)
    assert_works_on(buffer(np.zeros(32)), 0.0)


def run_one(kernel: str, x: Buffer) -> None:
    command_buffer = device("fast").newCommandQueue().commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    encoder.setComputePipelineState_(pipeline(SOURCE, kernel))
    encoder.setBuffer_offset_atIndex_(x, 0, 0)
    encoder.dispatchThreadgroups_threadsPerThreadgroup_((1, 1, 1), (32, 1, 1))
    encoder.endEncoding()
    command_buffer.commit()


def test_an_endless_loop_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SOFTWARE_GPU_SECONDS", "0.2")
    x, kept = buffer(np.zeros(32)), buffer(np.arange(5000))
    with pytest.raises(DeviceError, match=r"kernel 'endless': .*nothing moved for 0.2 seconds.*NPU_SOFTWARE_GPU_S"):
        commit("endless", [x, uints(1)])
    assert (floats(kept) == np.arange(5000)).all()
    assert_works_on(buffer(np.zeros(32)), 0.0)


def test_a_time_limit_that_is_no_number_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SOFTWARE_GPU_SECONDS", "soon")
    with pytest.raises(DeviceError, match="NPU_SOFTWARE_GPU_SECONDS is 'soon', expected seconds"):
        commit("endless", [buffer(np.zeros(32)), uints(1)])


@pytest.mark.skipif(MACHINE != "x86_64", reason="a way into the system that only this processor has")
def test_system_calls_of_32_bits_end_the_process(tmp_path: Path) -> None:
    failure = run_native(ENTRY + '{ long r = 20; __asm__ volatile("int $0x80" : "+a"(r) : : "memory"); }', tmp_path)
    assert failure is not None
    assert failure.reason == "a kernel made a system call"


@pytest.mark.parametrize("number", CALLS[MACHINE])
def test_system_calls_end_the_process(number: int, tmp_path: Path) -> None:
    failure = run_native(ENTRY + "{" + SYSTEM_CALL[MACHINE].format(number) + "}", tmp_path)
    assert failure is not None
    assert failure.reason == "a kernel made a system call"


HOSTILE = {
    "writing to code": "*(volatile unsigned char*)(void*)entry = 0;",
    "a trap": "__builtin_trap();",
    "jumping into a buffer": "((void (*)())d->buffers[0])();",
    "the stack": "volatile unsigned char* p = (unsigned char*)&w; for (;;) *p++ = 0;",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_code_ends_its_own_process_only(text: str, tmp_path: Path) -> None:
    x = buffer(np.zeros(32))
    failure = run_native(ENTRY + "{" + HOSTILE[text] + "}", tmp_path)
    assert failure is not None
    assert_works_on(x, 0.0)


def test_what_code_writes_over_the_header_fools_nobody(tmp_path: Path) -> None:
    memory = shared_memory()
    overwrite = f"unsigned char* p = (unsigned char*){memory.base}ul; for (int i = 64; i < 4096; ++i) p[i] = 0xfd;"
    assert run_native(ENTRY + "{" + overwrite + " __builtin_trap(); }", tmp_path) is not None
    assert_works_on(buffer(np.zeros(32)), 0.0)


REFUSED = {
    'extern "C" int system(const char*);' + ENTRY + '{ system("true"); }': "calls 'system'",
    "static int counter;" + ENTRY + "{ ++counter; }": "variables at program scope",
    "thread_local int counter; " + ENTRY + "{ ++counter; }": "variables at program scope",
}


@pytest.mark.parametrize("text", REFUSED)
def test_libraries_that_are_more_than_kernels_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(KernelCompileError, match=f"a test's code: .*{REFUSED[text]}"):
        run_native(text, tmp_path)


def test_constructors_never_run(tmp_path: Path) -> None:
    """Not even where the compiler lets them pass, which it doesn't with the flags of kernels."""
    planted = "__attribute__((constructor)) static void planted() { *(volatile int*)16 = 1; }"
    with pytest.raises(KernelCompileError, match="global constructor"):
        run_native(planted + ENTRY + "{}", tmp_path)
    assert run_native(planted + ENTRY + "{}", tmp_path, ["-Wno-global-constructors"]) is None


def test_a_damaged_library_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "native.so"
    find_toolchain().build(f'#include "msl.h"\n{ENTRY}{{}}', target)
    content = target.read_bytes()
    for damaged in (b"", content[:40], content[:200], b"\x7fELX" + content[4:]):
        target.write_bytes(damaged)
        with pytest.raises(KernelCompileError, match="a test's code"):
            place_code(target, "a test's code")


def test_the_process_holds_no_descriptors_and_no_environment() -> None:
    isolation()
    folder = Path(f"/proc/{device_pid()}")
    try:
        assert list((folder / "fd").iterdir()) == []
        environment = (folder / "environ").read_bytes()
    except PermissionError:  # it lets no one look into it, but for the system's administrator
        return
    names = {entry.partition(b"=")[0] for entry in environment.split(b"\0")}
    assert names <= {b"", b"LD_LIBRARY_PATH"}


def test_a_process_that_was_killed_while_idle_is_replaced() -> None:
    x = buffer(np.zeros(32))
    commit("add_one", [x])
    process = device_process._device()._process
    assert process is not None
    os.kill(device_pid(), signal.SIGKILL)
    assert process.ended.wait(30)
    assert_works_on(x, 1.0)


def test_threads_commit_at_once() -> None:
    buffers = [buffer(np.zeros(32)) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda x: [commit("add_one", [x]) for _ in range(20)], buffers))
    assert all((floats(x) == 20).all() for x in buffers)


def test_memory_is_given_back() -> None:
    memory = shared_memory()
    gc.collect()
    before, files = memory.bytes_in_use(), len(os.listdir("/proc/self/fd"))
    for index in range(2000):
        x = device("fast").newBufferWithLength_options_(1000 * (index % 700 + 1), 0)
        floats_of = np.frombuffer(x.contents().as_buffer(x.length()), np.uint8)
        assert not floats_of[:: max(1, len(floats_of) // 16)].any()
        floats_of[:] = 1
        if index % 50 == 0:
            commit("add_one", [x])
    del x, floats_of
    gc.collect()
    assert memory.bytes_in_use() - before < 33 << 20  # of 700 MB; the last ones are kept for the next of their size
    assert len(os.listdir("/proc/self/fd")) == files
    assert len(memory._free) < 100


def test_memory_that_comes_again_is_zero() -> None:
    addresses = set()
    for _ in range(5):
        x = device("fast").newBufferWithLength_options_(300_000, 0)
        addresses.add(x.address)
        assert not floats(x).any()
        floats(x)[:] = 7
        del x
    assert len(addresses) == 1


def test_an_array_keeps_its_memory_after_the_buffer_is_gone() -> None:
    x = buffer(np.full(1 << 16, 3.0))
    values = floats(x)
    del x
    gc.collect()
    others = [buffer(np.zeros(1 << 16)) for _ in range(4)]
    assert (values == 3).all()
    assert not any(floats(other).any() for other in others)


def test_a_buffer_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(DeviceError, match="no memory for a buffer of"):
        device("fast").newBufferWithLength_options_(1 << 50, 0)


def test_memory_of_the_caller_goes_there_and_back() -> None:
    callers = np.frombuffer(bytearray(3 * 4096), np.uint8)
    start = -callers.ctypes.data % 4096
    page = callers[start : start + 4096].view(np.float32)
    x = device("fast").newBufferWithBytesNoCopy_length_options_deallocator_(page, 4096, 0, None)
    page[:] = 5
    commit("add_one", [x])
    assert (page[:32] == 6).all()
    assert (page[32:] == 5).all()


def _in_a_fork(x: Buffer, report: Callable[[object], None]) -> None:
    commit("add_one", [x])
    report((device_pid(), floats(x).tolist()))


def _fork(x: Buffer) -> tuple[int, list[float]]:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_in_a_fork, args=(x, theirs.send))
    child.start()
    theirs.close()
    assert mine.poll(60)
    found: tuple[int, list[float]] = mine.recv()
    child.join()
    assert child.exitcode == 0
    return found


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_a_device_and_memory_of_its_own() -> None:
    x = buffer(np.zeros(32))
    commit("add_one", [x])
    own = device_pid()
    pid, values = _fork(x)
    assert pid != own
    assert values == [2.0] * 32
    assert device_pid() == own
    assert_works_on(x, 1.0)
    assert gone(pid)


def gone(pid: int) -> bool:
    """Whether a process ends soon."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


CHILD = """
import os, signal, sys, time
import numpy as np
from tests.software_gpu.test_process import *
x = buffer(np.zeros(32))
commit("add_one", [x])
print(device_pid(), flush=True)
"""


def child(text: str) -> subprocess.Popen[str]:
    code = CHILD + textwrap.dedent(text)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_interrupting_an_endless_loop_is_prompt_and_leaves_a_device_that_works() -> None:
    with child(
        """
        try:
            commit("endless", [buffer(np.zeros(32)), uints(1)])
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        assert_works_on(x, 1.0)
        print("works", flush=True)
        """
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        time.sleep(0.3)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - started < 2
        assert process.stdout.readline() == "works\n"
    assert process.returncode == 0
    assert gone(pid)


@pytest.mark.parametrize("end", ["killed", "killed in a kernel", "at its end"])
def test_no_process_is_left_behind(end: str) -> None:
    text = {
        "killed": "time.sleep(60)",
        "killed in a kernel": 'commit("endless", [x, uints(1)])',
        "at its end": "",
    }[end]
    with child(text) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        if end != "at its end":
            time.sleep(0.2)
            process.kill()
    assert gone(pid)


def test_threads_that_come_first_at_once_make_one_device() -> None:
    with child(
        """
        device_process._device().stop()
        sys.setswitchinterval(1e-6)
        for _ in range(20):
            device_process._created_device.cache_clear()
            with ThreadPoolExecutor(8) as pool:
                assert len(set(pool.map(lambda _: id(device_process._device()), range(8)))) == 1
        """
    ) as process:
        process.communicate()
    assert process.returncode == 0


def test_a_process_begun_by_a_thread_outlives_it() -> None:
    with child(
        """
        import threading
        device_process._device().stop()
        thread = threading.Thread(target=commit, args=("add_one", [x]))
        thread.start(); thread.join()
        first = device_pid()
        time.sleep(0.1)
        commit("add_one", [x])
        assert device_pid() == first
        """
    ) as process:
        process.communicate()
    assert process.returncode == 0
