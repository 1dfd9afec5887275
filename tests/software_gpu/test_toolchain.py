"""The compiler that is killed, out of space, or not there; levels that are no levels; symbols that no one provides."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from npu_cli.commands import doctor
from npu_cli.main import main
from npu_compiler.errors import KernelCompileError, ToolchainError
from software_gpu import cache, library, limited_process, toolchain
from software_gpu.library import compile_for, compile_library
from software_gpu.limited_process import run_limited
from software_gpu.machine_code import undefined_symbols
from software_gpu.native_runtime import load_runtime
from software_gpu.probe import kept_fallbacks, repair
from software_gpu.processor import ENVIRONMENT_VARIABLE, LEVELS, missing_features
from tests.software_gpu.test_library import SOURCE, SYNCHRONISING, entries, forget_loaded


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, and no library in memory."""
    load_runtime()  # from the cache that the process already uses
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(library, "_loaded", {})
    return tmp_path / "software_gpu"


def compiler_that(folder: Path, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a program of a few shell lines in the compiler's place."""
    path = folder / "clang"
    path.write_text(f"#!/bin/sh\n{action}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    changed = dataclasses.replace(toolchain.find_toolchain(), compiler=(str(path),))
    monkeypatch.setattr(library, "find_toolchain", lambda: changed)


FAILURES = {
    "interrupted": ("kill -INT $$; sleep 5", "SIGINT"),
    "killed": ("kill -KILL $$", "SIGKILL"),
    "of a killed child": ("exit 254", "status 254"),
    "without space": ("echo 'error: unable to write output: No space left on device' >&2; exit 1", "No space left"),
    "without space for a header": (
        "echo 'x.cpp:1:1: fatal error: cannot open file: No space left on device' >&2; exit 1",
        "TMPDIR",
    ),
    "without permission": ("echo 'error: cannot open kernel.o: Permission denied' >&2; exit 1", "Permission denied"),
    "silent": ("exit 1", "status 1"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_compilation_without_a_verdict_is_an_error_of_its_own_and_leaves_nothing(
    name: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    action, expected = FAILURES[name]
    with monkeypatch.context() as patch:
        compiler_that(tmp_path, action, patch)
        with pytest.raises(ToolchainError, match=expected):
            compile_library(SYNCHRONISING, {})
    assert list(empty_cache.iterdir()) == []
    assert "region" in compile_library(SYNCHRONISING, {}).kernels["turned"].entries


@pytest.mark.parametrize(
    "action",
    [
        "kill -SEGV $$; sleep 5",
        "exit 139",
        "echo 'LLVM ERROR: out of memory' >&2; exit 134",
        "echo 'zig: error: clang frontend command failed with exit code 134 (use -v to see invocation)' >&2; exit 1",
    ],
)
def test_a_crash_of_the_compiler_is_its_verdict(
    action: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_that(tmp_path, action, monkeypatch)
    with pytest.raises(KernelCompileError, match="gave up on the kernel source"):
        compile_library(SYNCHRONISING, {})
    assert list(empty_cache.iterdir()) == []


def test_interrupt_of_the_first_compilation_is_not_remembered(empty_cache: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches the whole foreground group: Python and its compiler."""
    code = f"from software_gpu.library import compile_library\ncompile_library({SYNCHRONISING!r}, {{}})"
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    running = subprocess.Popen(command, cwd=root, start_new_session=True, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and running.poll() is None and not any(empty_cache.glob("*")):
        time.sleep(0.01)
    os.killpg(running.pid, 2)
    assert running.communicate(timeout=60)[1] is not None
    assert not [path for path in entries(empty_cache) if b"slow" in path.read_bytes() and fallback_in(path)]


def fallback_in(path: Path) -> bool:
    return b'"slow_because": ""' not in path.read_bytes()


def test_full_folder_for_temporary_files_is_said(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", no_space)
    with pytest.raises(ToolchainError, match=r"No space left on device.*TMPDIR"):
        compile_library(SOURCE.format("full"), {})
    assert list(empty_cache.iterdir()) == []


def test_full_cache_is_said(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(ToolchainError, match=r"can't be kept.*No space left.*NPU_CACHE_DIR"):
        compile_library(SOURCE.format("full"), {})
    assert list(empty_cache.iterdir()) == []


def test_fallbacks_are_repaired(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(library, "region_entry", lambda *_: "int region = nowhere;")
        with pytest.warns(RuntimeWarning, match="on fibers"):
            compile_library(SYNCHRONISING, {})
    compile_library(SOURCE.format("kept"), {})
    (empty_cache / "damaged.so").write_bytes(b"short")
    (reason,) = kept_fallbacks()
    assert "nowhere" in reason
    assert repair() == 2
    assert len(entries(empty_cache)) == 1
    compile_for("native", SYNCHRONISING, {})  # would say that the faster form was refused


def test_another_version_of_the_compiler_tries_again() -> None:
    own = toolchain.find_toolchain()
    other = dataclasses.replace(own, fingerprint="other")
    keys = {library._key(SYNCHRONISING, {}, library.Execution.FAST, one) for one in (own, other)}
    assert len(keys) == 2


def test_foreign_entry_is_built_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of another architecture, whole as far as its digest tells."""
    compile_library(SOURCE.format("own"), {})
    (entry,) = entries(empty_cache)
    description = cache._read_verified(entry)
    other = "generic" if LEVELS["generic"].machine != os.uname().machine else "x86-64"

    def foreign(path: Path) -> bytes:
        toolchain.toolchain_for(other).build("int nothing;", path)
        assert description is not None
        return description

    entry.unlink()
    cache.load_or_build(entry.stem, foreign)
    forget_loaded(monkeypatch)
    assert list(compile_library(SOURCE.format("own"), {}).kernels) == ["own"]


CALLS = """using namespace metal;
extern "C" int system(device const char* command);
kernel void k(device char* x [[buffer(0)]]) { x[0] = (char)system(x); }
"""


@pytest.fixture
def no_text_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets any C++ through to the compiler: linking is a fence of its own."""
    monkeypatch.setattr("software_gpu.source.checked_text", lambda text: text)
    monkeypatch.setattr("software_gpu.source.check_language", lambda tokens: None)


@pytest.mark.usefixtures("no_text_check")
def test_a_symbol_that_nothing_provides_is_named(empty_cache: Path) -> None:
    with pytest.raises(KernelCompileError, match="kernel 'k' needs 'system'"):
        compile_library(CALLS, {})
    with pytest.raises(KernelCompileError, match="kernel 'k' needs 'system'"):
        compile_for("generic", CALLS, {})
    assert entries(empty_cache) == []


@pytest.mark.usefixtures("no_text_check")
def test_a_library_that_does_not_load_names_kernel_and_symbol(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "undefined_symbols", lambda content: [])
    source = CALLS.replace("system", "nowhere")
    with pytest.raises(KernelCompileError, match=r"kernel 'k' does not load.*nowhere"):
        library._load_entry(
            "nowhere",
            lambda path: library._build(source, {}, library.Execution.FAST, path, toolchain.find_toolchain()),
            lambda kernel: 0,
        )


def test_undefined_symbols_of_a_library(tmp_path: Path) -> None:
    target = tmp_path / "x.so"
    text = 'extern "C" int far(); extern "C" __attribute__((visibility("default"))) int near() { return far(); }'
    toolchain.find_toolchain().build(text, target)
    assert undefined_symbols(target.read_bytes()) == ["far"]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("x86-64-v5", "no processor level.*native"),
        ("neoverse-n1" if os.uname().machine == "x86_64" else "x86-64", "can't run such code.*architecture"),
    ],
)
def test_levels_that_can_not_be_run(level: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, level)
    with pytest.raises(ToolchainError, match=expected):
        compile_library(SOURCE.format("level"), {})


def test_levels_that_lack_an_instruction_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("software_gpu.processor.machine_features", frozenset)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert "avx2" in missing_features(LEVELS["x86-64-v3"])
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "x86-64-v3")
    with pytest.raises(ToolchainError, match=r"it lacks .*avx2"):
        toolchain.find_toolchain()


def test_doctor_fails_where_the_device_computes_wrongly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("software_gpu.probe._run", lambda device, library, name, x: x)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 1
    assert "expected 4" in " ".join(capsys.readouterr().out.split())


def test_doctor_fails_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_runtime()
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("NPU_CACHE_DIR", str(occupied))
    assert main(["doctor"]) == 1
    assert "NPU_CACHE_DIR" in capsys.readouterr().out


def test_doctor_minds_no_file_that_is_gone_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / str(number)).write_text("kept")

    class Entry:
        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.entry = entry

        def is_file(self) -> bool:
            return True

        def stat(self) -> os.stat_result:
            if self.entry.name == "1":
                raise FileNotFoundError(self.entry.path)
            return self.entry.stat()

    with os.scandir(tmp_path) as entries:
        kept = list(entries)
    monkeypatch.setattr("os.scandir", lambda folder: nullcontext([Entry(entry) for entry in kept]))
    assert sum(doctor._sizes(tmp_path)) == 8


def test_doctor_repairs(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty_cache.mkdir(parents=True, exist_ok=True)
    (empty_cache / "damaged.so").write_bytes(b"short")
    assert main(["doctor", "--repair"]) == 0
    assert "1 damaged or refused" in capsys.readouterr().out
    assert not (empty_cache / "damaged.so").exists()


@pytest.mark.parametrize("ends_are_told", [True, False])
def test_a_process_is_given_its_whole_input_and_waited_for(
    ends_are_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ends_are_told:  # by the system
        monkeypatch.setattr(os, "pidfd_open", no_such_call)
    text = "0123456789" * 100_000  # more than a pipe holds
    assert run_limited(["cat"], text).stdout == text
    assert run_limited(["true"], text).returncode == 0
    assert run_limited(["sh", "-c", "exec <&-; sleep 0.05; exit 3"], text).returncode == 3
    monkeypatch.setattr(limited_process, "WALL_SECONDS", 0.05)
    for given in ("", text):
        with pytest.raises(KernelCompileError, match=r"more than 0\.05 seconds"):
            run_limited(["sleep", "60"], given)


def no_such_call(process: int) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
