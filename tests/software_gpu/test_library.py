"""Compilation: the cache on disk, several threads and processes, machines without a compiler."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from npu_compiler.errors import KernelCompileError, ToolchainError
from software_gpu import cache, library, toolchain
from software_gpu.library import compile_library
from software_gpu.native_runtime import load_runtime
from software_gpu.probe import slow_kernels_reason
from tests.software_gpu.harness import HEAD, compile_error

SOURCE = HEAD + "kernel void {}(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) {{ y[i] = 1.0f; }}"

SYNCHRONISING = (
    HEAD
    + """
kernel void turned(device float* y [[buffer(0)]], uint i [[thread_position_in_threadgroup]])
{
    threadgroup float values[32];
    values[i] = y[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = values[31 - i];
}
"""
)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, and no library in memory."""
    load_runtime()  # from the cache that the process already uses
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(library, "_loaded", {})
    return tmp_path / "software_gpu"


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def forget_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", {})


def test_second_compilation_reads_the_cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_library(SOURCE.format("a"), {})
    (entry,) = entries(empty_cache)
    written = entry.stat().st_mtime_ns
    forget_loaded(monkeypatch)
    assert list(compile_library(SOURCE.format("a"), {}).kernels) == ["a"]
    assert entry.stat().st_mtime_ns == written
    compile_library(SOURCE.format("NAME"), {"NAME": "b"})
    compile_library(SOURCE.format("NAME"), {"NAME": "c"})
    assert len(entries(empty_cache)) == 3


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_damaged_entry_is_compiled_again(damage: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"of_{damage}"
    compile_library(SOURCE.format(name), {})
    (entry,) = entries(empty_cache)
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged = {"truncated": bytes(content[:1000]), "flipped": bytes(content), "empty": b""}[damage]
    entry.unlink()  # the old file is still mapped
    entry.write_bytes(damaged)
    forget_loaded(monkeypatch)
    assert list(compile_library(SOURCE.format(name), {}).kernels) == [name]
    assert entry.read_bytes() != damaged


def test_failed_compilation_leaves_nothing(empty_cache: Path) -> None:
    with pytest.raises(KernelCompileError, match="program_source:3"):
        compile_library(HEAD + "kernel void k(device float* y [[buffer(0)]]) { y[0] = nonsense; }", {})
    assert list(empty_cache.iterdir()) == []


def test_kernels_whose_faster_form_does_not_compile_run_on_fibers_and_say_so(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "region_entry", lambda *_: "int region = nowhere;")
    with pytest.warns(RuntimeWarning, match=r"(?s)the kernels turned run on fibers.*nowhere.*npu doctor"):
        assert set(compile_library(SYNCHRONISING, {}).kernels["turned"].entries) == {"fiber"}
    compile_library(SYNCHRONISING, {})  # the same process has been told
    forget_loaded(monkeypatch)
    with pytest.warns(RuntimeWarning, match="on fibers"):  # from the cache on disk
        assert "nowhere" in compile_library(SYNCHRONISING, {}).slow_because
    assert "nowhere" in slow_kernels_reason()


def test_kernels_need_no_fibers_here(empty_cache: Path) -> None:
    assert slow_kernels_reason() == ""
    assert "region" in compile_library(SYNCHRONISING, {}).kernels["turned"].entries


def test_threads_compile_once(empty_cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: compile_library(SOURCE.format("t"), {}), range(8)))
    assert all(one is made[0] for one in made)
    assert len(entries(empty_cache)) == 1


def test_processes_share_the_cache(empty_cache: Path) -> None:
    code = (
        "from software_gpu.library import compile_library\n"
        f"print(list(compile_library({SOURCE.format('p')!r}, {{}}).kernels))"
    )
    root = Path(__file__).parents[2]
    running = [
        subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["['p']"] * 3
    assert all(path.suffix == ".so" for path in empty_cache.iterdir())


def test_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    monkeypatch.setenv("NPU_CACHE_DIR", str(occupied))
    with pytest.raises(ToolchainError, match="NPU_CACHE_DIR"):
        cache.load_or_build("key", lambda path: b"")


def test_machine_without_compiler_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ToolchainError, match="software-gpu"):
        toolchain.toolchain_for.__wrapped__("native")


def test_other_system_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Plan9")
    with pytest.raises(ToolchainError, match="not on Plan9"):
        toolchain.find_toolchain()


REFUSED = {
    "kernel void k(device float* y [[buffer(0)]]);": "has no body",
    "kernel float k(device float* y [[buffer(0)]]) { return 1; }": "must be followed by 'void name",
    "constant bool wide [[function_constant(0)]];": "choose with a preprocessor macro",
    "kernel void k() {}\nkernel void k() {}": "defined twice",
    "kernel void k() {": "never closed",
    "#error stop": "stop",
}


@pytest.mark.parametrize("text", REFUSED)
def test_source_that_is_not_understood(text: str) -> None:
    assert REFUSED[text] in compile_error(HEAD + text)


def test_functions_on_fibers_are_compiled_once_however_often_they_are_called(empty_cache: Path) -> None:
    """Each of four calls the one before four times: copied into each other they would be 256 bodies."""
    functions = (
        "METAL_FUNC float f0(threadgroup float* v, uint i) "
        "{ threadgroup_barrier(mem_flags::mem_threadgroup); return v[31 - i]; }\n"
    )
    for level in range(1, 5):
        calls = " + ".join(f"f{level - 1}(v, (i + {at}) & 31)" for at in range(4))
        functions += f"METAL_FUNC float f{level}(threadgroup float* v, uint i) {{ return {calls}; }}\n"
    kernel = (
        "kernel void deep(device float* y [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) "
        "{ threadgroup float v[32]; v[i] = y[i]; y[i] = f4(v, i); }"
    )
    compile_library(HEAD + functions + kernel, {}, execution=library.Execution.FIBERS)
    (entry,) = entries(empty_cache)
    assert entry.stat().st_size < 40_000
