"""Planted errors: each check finds its own kind, in the kernel and argument that have it."""

from __future__ import annotations

import numpy as np
import pytest

from npu_compiler.errors import DeviceError
from software_gpu.checks import find_problems
from tests.software_gpu.harness import HEAD, compile_error, run

KERNEL = "kernel void k(device float* y [[buffer(0)]], {} uint i [[thread_position_in_grid]]) {{ {} }}"

WRONG_SPACES = {
    "threadgroup pointer to device memory": ("", "threadgroup float* p = y; p[0] = 1.0f;"),
    "device memory passed as threadgroup": ("", "fill(y);"),
    "constant memory passed as device": ("constant float* c [[buffer(1)]],", "y[i] = first(c);"),
    "pointer without a space to device memory": ("", "float* p = y; p[i] = 1.0f;"),
    "constant memory written": ("constant float* c [[buffer(1)]],", "c[i] = 1.0f;"),
}
HELPERS = """
inline void fill(threadgroup float* p) { p[0] = 1.0f; }
inline float first(device const float* p) { return p[0]; }
"""


@pytest.mark.parametrize("case", WRONG_SPACES)
def test_wrong_address_space_is_found(case: str) -> None:
    parameters, body = WRONG_SPACES[case]
    problems = find_problems(HEAD + HELPERS + KERNEL.format(parameters, body))
    assert problems
    assert problems[0].startswith("line 6:")


REFUSED = {
    "parameter without address space": ("float* x [[buffer(1)]],", "y[i] = x[i];", "must name device, constant"),
    "double": ("", "y[i] = float(double(1.0));", "MSL has no double"),
    "index taken twice": ("device float* x [[buffer(0)]],", "y[i] = x[i];", "index 0 is taken by 'y'"),
    "missing attribute": ("device float* x,", "y[i] = x[i];", "expected one attribute"),
    "unknown attribute": ("uint v [[vertex_id]],", "y[i] = 1.0f;", "is not offered"),
    "threadgroup variable with initialiser": ("", "threadgroup float t = 1.0f; y[i] = t;", "initialiser"),
    "threadgroup variable in a branch": ("", "if (i) { threadgroup float t; t = 1; y[i] = t; }", "outermost scope"),
    "ambiguous overload": ("", "y[i] = max(y[i], 1);", "no matching function"),
    "unknown function": ("", "y[i] = erf(y[i]);", "erf"),
    "goto": ("", "again: if (y[i] < 1.0f) goto again;", "MSL has no goto"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_metal_refuses_is_refused(case: str) -> None:
    parameters, body, message = REFUSED[case]
    assert message in compile_error(HEAD + KERNEL.format(parameters, body))


PROGRAM_SCOPE = {
    "float table[2] = {1.0f, 2.0f};": "'table': a variable outside a function must be 'constant'",
    "static constexpr float scale = 2.0f;": "'scale': a variable outside a function must be 'constant'",
    "inline float f(float x) { return x < 1.0f ? x : f(x - 1.0f); }": "'f' calls itself",
}


@pytest.mark.parametrize("text", PROGRAM_SCOPE)
def test_program_scope(text: str) -> None:
    assert PROGRAM_SCOPE[text] in compile_error(HEAD + text + "\n" + KERNEL.format("", "y[i] = 1.0f;"))


def test_allowed_at_program_scope() -> None:
    source = (
        HEAD
        + "constant float table[2] = {1.0f, 2.0f};\nconstant constexpr uint N = 2;\nstruct P { uint n; };\n"
        + "enum Mode { first, second };\ntypedef float number;\nusing other = float;\n"
        + "template <typename T> T twice(T x);\n"
        + "template <typename T> inline T twice(T x) { return x + x; }\n"
        + KERNEL.format("", "y[i] = twice(table[i % N]);")
    )
    assert find_problems(source) == []


RACES = {
    "missing barrier": "t[i] = y[i]; y[i] = t[63 - i];",
    "all write": "t[i] = 0.0f; y[0] = float(i);",
    "barrier of the other memory": "y[i] = 1.0f; threadgroup_barrier(mem_flags::mem_threadgroup); t[i] = y[63 - i];",
    "groups write the same place": "t[i % 64] = 0.0f; y[i % 64] = float(i);",
    "read by the simdgroup, then written": "t[i] = y[i < 32 ? 0 : i]; if (i == 5) y[0] = t[i];",
    "read by others too, then written": "t[i] = simd_sum(y[0]); if (i == 0) y[0] = t[i];",
    "read again, then written": "t[i] = simd_sum(y[i < 32 ? 0 : i]); if (i < 9) t[i] = y[0]; if (i == 5) y[0] = t[i];",
}
ORDERED = {
    "read by the simdgroup": "float sum = simd_sum(y[i < 32 ? 0 : i]); if (i == 5) y[0] = sum;",
    "read twice": "float sum = simd_sum(y[i & 32]) + simd_sum(y[i & 32]); if (i % 32 == 5) y[i & 32] = sum;",
    "read by all": "t[i] = y[0]; threadgroup_barrier(mem_flags::mem_device); if (i == 5) y[0] = t[i];",
}


@pytest.mark.parametrize("case", RACES)
def test_race_is_found(case: str) -> None:
    source = HEAD + KERNEL.format("", "threadgroup float t[64]; " + RACES[case])
    groups = (2, 1, 1) if case.startswith("groups") else (1, 1, 1)
    place = "threadgroup memory" if case == "missing barrier" else r"argument 'y' \[\[buffer\(0\)\]\]"
    with pytest.raises(DeviceError, match=rf"kernel 'k': thread \d+ and (thread \d+|several threads) touch .*{place}"):
        run(source, "k", [np.zeros(64, np.float32)], groups, (64, 1, 1), kind="check")


@pytest.mark.parametrize("case", ORDERED)
def test_what_a_barrier_or_a_simdgroup_function_orders_is_no_race(case: str) -> None:
    source = HEAD + KERNEL.format("", "threadgroup float t[64]; t[i] = 0.0f; " + ORDERED[case])
    run(source, "k", [np.zeros(64, np.float32)], (1, 1, 1), (64, 1, 1), kind="check")


OUT_OF_BOUNDS = {
    "read past the end": (
        "float v = y[i + 1]; if (v > 1e30f) y[i] = v;",
        r"thread 63 reads out of bounds, 0 bytes past the end of argument 'y'",
    ),
    "write past the end": ("y[i + 2] = 1.0f;", r"thread 62 writes out of bounds, 0 bytes past the end of argument 'y'"),
    "before the start": ("y[int(i) - 1] = 1.0f;", r"thread 0 writes out of bounds, 4 bytes before the start"),
}
ARRAYS = {
    "threadgroup array": ("threadgroup float t[64], u[64]; for (uint j = 0; j <= 64; ++j) t[j] = 0; u[i] = 0;", 64),
    "row of a threadgroup array": ("threadgroup float t[4][16]; t[i / 16][i % 16 + 1] = y[i];", 16),
    "thread's array": ("float t[8]; for (uint j = 0; j <= i; ++j) t[j] = y[i]; y[i] = t[0];", 8),
    "constant array": ("const float t[4] = {1, 2, 3, 4}; y[i] = t[i];", 4),
}
POINTERS = {
    "threadgroup array, passed on": "threadgroup float t[64], u[64]; u[i] = 0.0f; put(t, i + 1); y[i] = u[i];",
    "thread's array, passed on": "float t[4]; fill(t, i); y[i] = t[i & 3];",
}
PASSED_ON = """
inline void put(threadgroup float* p, uint i) { p[i] = 1.0f; }
inline void fill(thread float* p, uint n) { for (uint j = 0; j < n; ++j) p[j] = float(n - j); }
"""


@pytest.mark.parametrize("case", ARRAYS)
def test_a_subscript_beyond_an_array_is_found(case: str) -> None:
    body, index = ARRAYS[case]
    source = HEAD + KERNEL.format("", body)
    with pytest.raises(DeviceError, match=rf"kernel 'k', line 3: thread \d+ takes element {index} of an array"):
        run(source, "k", [np.zeros(64, np.float32)], (1, 1, 1), (64, 1, 1), kind="check")


@pytest.mark.parametrize("case", POINTERS)
def test_a_pointer_that_leaves_its_array_is_found(case: str) -> None:
    source = HEAD + PASSED_ON + KERNEL.format("", POINTERS[case])
    with pytest.raises(DeviceError, match=r"kernel 'k'.*(out of bounds|takes an element of an array)"):
        run(source, "k", [np.zeros(64, np.float32)], (1, 1, 1), (64, 1, 1), kind="check")


@pytest.mark.parametrize("case", OUT_OF_BOUNDS)
def test_access_out_of_bounds_is_found(case: str) -> None:
    body, message = OUT_OF_BOUNDS[case]
    with pytest.raises(DeviceError, match=message):
        run(HEAD + KERNEL.format("", body), "k", [np.zeros(64, np.float32)], (1, 1, 1), (64, 1, 1), kind="check")


def test_memory_that_no_one_wrote_is_nan() -> None:
    source = HEAD + KERNEL.format("", "threadgroup float t[64]; if (i < 32) t[i] = 1.0f; y[i] = t[i];")
    (y,) = run(source, "k", [np.zeros(64, np.float32)], (1, 1, 1), (64, 1, 1), kind="check")
    assert np.isnan(y[32:]).all()
    assert (y[:32] == 1.0).all()


def test_order_of_threads_shows() -> None:
    body = "threadgroup float t[1]; t[0] = float(i); threadgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[0];"
    source, arguments = HEAD + KERNEL.format("", body), [np.zeros(64, np.float32)]
    assert run(source, "k", arguments, (1, 1, 1), (64, 1, 1), kind="fibers")[0][0] == 63
    assert run(source, "k", arguments, (1, 1, 1), (64, 1, 1), kind="reversed")[0][0] == 0
