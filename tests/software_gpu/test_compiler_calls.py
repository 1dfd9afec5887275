"""How often the compiler is called: most of what a first start, and the test suite, takes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import npu_compiler
from npu_runtime import Device, Executor
from software_gpu import library, toolchain
from software_gpu.library import compile_library
from software_gpu.limited_process import run_limited
from software_gpu.native_runtime import load_runtime
from tests.ops.cases import case, floats
from tests.software_gpu.harness import HEAD, run
from tests.software_gpu.test_library import SOURCE, SYNCHRONISING

CONDITIONAL = SYNCHRONISING.replace("y[i] = values[31 - i];", "\n#if 1\n    y[i] = values[31 - i];\n#endif\n")
COMPUTING = SYNCHRONISING.replace("float", "bfloat").replace("y[i] = values[31 - i];", "y[i] = -values[31 - i];")


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the compiler is called for, from now on, in a process that has compiled nothing."""
    load_runtime()  # from the cache that the process already uses
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(toolchain, "_headers", {})
    made = []

    def counted(command: Sequence[str], source: str, inherited: Sequence[int]) -> subprocess.CompletedProcess[str]:
        made.append(_purpose(command))
        return run_limited(command, source, inherited)

    monkeypatch.setattr(toolchain, "run_limited", counted)
    return made


def _purpose(command: Sequence[str]) -> str:
    words = {"c++-header": "headers", "-E": "macros", "-emit-llvm": "translate", "-c": "compile", "-shared": "link"}
    return next(purpose for word, purpose in words.items() if word in command)


def test_headers_are_read_once(calls: list[str]) -> None:
    compile_library(SOURCE.format("a"), {})
    assert calls == ["headers", "compile"]
    compile_library(SOURCE.format("b"), {})
    assert calls[2:] == ["compile"]
    compile_library(SOURCE.format("b"), {})
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SYNCHRONISING, ["compile"]),
        (CONDITIONAL, ["macros", "compile"]),
        (SYNCHRONISING.replace("float", "bfloat"), ["compile"]),
        (COMPUTING, ["compile", "headers", "translate", "compile"]),
    ],
    ids=["plain", "conditional", "bfloat", "bfloat that is computed in"],
)
def test_a_source_is_compiled_once_whatever_its_forms(source: str, expected: list[str], calls: list[str]) -> None:
    compile_library(SOURCE.format("a"), {})
    del calls[:]
    assert list(compile_library(source, {}).kernels["turned"].entries) == ["region"]
    assert calls == expected


def test_a_form_for_cut_threadgroups_is_compiled_when_one_is_cut(calls: list[str]) -> None:
    source = HEAD + (
        "kernel void sums(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) "
        "{ float sum = simd_sum(y[i]); y[i] = sum; }"
    )
    y = np.arange(64, dtype=np.float32)
    (whole,) = run(source, "sums", [y], (2, 1, 1), (32, 1, 1))
    np.testing.assert_array_equal(whole, np.repeat([y[:32].sum(), y[32:].sum()], 32))
    assert calls == ["headers", "compile"]
    for _ in range(2):
        (cut,) = run(source, "sums", [y], (1, 1, 1), (32, 1, 1), grid=(40, 1, 1))
        np.testing.assert_array_equal(cut, [*[y[:32].sum()] * 32, *[y[32:40].sum()] * 8, *y[40:]])
        assert calls[2:] == ["compile"]


def test_a_program_calls_once_for_each_text(calls: list[str]) -> None:
    ir = case("addmm.default", floats(4), floats(3, 8), floats(8, 4)).ir(torch.float32)
    program = npu_compiler.compile(ir, target="metal")
    texts = {kernel.text for kernel in program.main.kernels}
    for _ in range(2):
        Executor(program, Device("software-metal"))
        assert calls.count("compile") == len(texts)
        assert calls.count("macros") <= len(texts)
        assert calls.count("headers") == 1
        assert calls.count("translate") <= len(texts)  # where the processor does not convert half
