"""Region splitting: each form it knows gives the bits of the fibers, each that it doesn't know goes to the fibers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import metal_compiler
import npu_compiler
from npu_compiler.errors import DeviceError
from software_gpu.library import Execution, compile_library, generate
from software_gpu.source import preprocess
from tests.compiler.test_templates import DRAW, coded_linear
from tests.ops.cases import case, floats, values
from tests.ops.collected import COMPUTED
from tests.software_gpu.harness import HEAD, Array, pipeline, read_kernels, run, uints

SPLIT = [
    "early_return",
    "collectives",
    "masked_collectives",
    "uniform_branches",
    "local_arrays",
    "long_loops",
    "atomics",
    "shared_scalars",
    "matrices_by_index",
    "uniform_between",
    "functions_with_barriers",
    "functions_with_collectives",
    "sorting_network",
    "guarded_steps",
    "values_of_all",
    "arrays_by_pointer",
]


def run_form(kernel: str, kind: str, threads: int = 128) -> Array:
    x = np.random.default_rng(1).standard_normal(512).astype(np.float32)
    arguments: list[Array | bytes] = [x, np.full(512, 7.0, np.float32), uints(5)]
    return run(read_kernels("forms"), kernel, arguments, (512 // 128, 1, 1), (threads, 1, 1), kind=kind)[1]


@pytest.mark.parametrize("kernel", SPLIT)
def test_form_is_split(kernel: str) -> None:
    assert "region" in pipeline(read_kernels("forms"), kernel).kernel.entries


@pytest.mark.parametrize("kernel", SPLIT)
def test_split_form_gives_the_bits_of_the_fibers(kernel: str) -> None:
    fast, fibers = run_form(kernel, "fast"), run_form(kernel, "fibers")
    np.testing.assert_array_equal(fast.view(np.uint32), fibers.view(np.uint32))


@pytest.mark.parametrize(("execution", "asks"), [(Execution.FAST, "false"), (Execution.FIBERS, "true")])
def test_matrices_ask_which_fiber_runs_only_where_some_do(execution: Execution, asks: str) -> None:
    code, _ = generate(preprocess(read_kernels("matmul"), {}), execution)
    assert f"bool runs_on_fibers() {{ return {asks}; }}" in code


def test_loops_around_loops_over_lanes_are_not_forced_to_be_unrolled() -> None:
    source = HEAD + (
        "kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { float sum = 0.0f; "
        "for (int around = 0; around < 4; ++around) { sum += simd_sum(y[i] * around); } "
        "for (int inside = 0; inside < 4; ++inside) { sum += y[i] * inside; } y[i] = sum; }"
    )
    code, _ = generate(preprocess(source, {}))
    assert '_Pragma("unroll") for (int inside' in code
    assert "for (int around" in code
    assert '_Pragma("unroll") for (int around' not in code


@pytest.mark.parametrize("kernel", SPLIT)
def test_order_of_fibers_changes_nothing(kernel: str) -> None:
    np.testing.assert_array_equal(run_form(kernel, "reversed"), run_form(kernel, "fibers"))


@pytest.mark.parametrize("kernel", SPLIT)
def test_check_finds_nothing_in_correct_forms(kernel: str) -> None:
    np.testing.assert_array_equal(run_form(kernel, "check"), run_form(kernel, "fibers"))


@pytest.mark.parametrize("kernel", ["collectives", "masked_collectives"])
def test_group_with_part_of_a_simdgroup_runs_on_fibers(kernel: str) -> None:
    np.testing.assert_array_equal(run_form(kernel, "fast", 100), run_form(kernel, "fibers", 100))


ON_FIBERS = {"draw"}
"""Where threads synchronise in branches that data decides: a draw looks only where its token may be."""


def kernels_of_the_project() -> list[str]:
    """Files with a kernel of their own; the others are built on, or are skeletons to be filled in."""
    folder = Path(metal_compiler.__file__).parent / "kernels"
    texts = {path.stem: path.read_text() for path in sorted(folder.glob("*.metal"))}
    return [name for name, text in texts.items() if f"kernel void {name}(" in text and "$" not in text]


@cache
def compiled_kernels() -> dict[str, str]:
    """The text of one kernel of each name that the compiler makes for the first cases of all ops, and for long rows."""
    first = {each.op: each for each in reversed(COMPUTED)}
    long_cache = case("scaled_dot_product_attention.default", *(floats(1, 2, rows, 64) for rows in (1, 5000, 5000)))
    vectors = [case(name, floats(1, 64), floats(64, 64)) for name in ("linear.default", "mm.default")]
    long_rows = [case("cumsum.default", floats(2, 30_000), 1), case("sort.stable", floats(1, 5000), stable=True)]
    ends = values(8, 16, dtype="int32")
    grouped = case("_grouped_mm.default", floats(16, 64), floats(2, 64, 48), ends, None, None)
    cases = [*first.values(), *vectors, *long_rows, long_cache]
    models = [*(each.ir(torch.float32) for each in cases), grouped.ir(torch.bfloat16)]
    programs = [npu_compiler.compile(model, "metal") for model in (*models, DRAW, coded_linear(1))]
    return {kernel.entry: kernel.text for program in programs for kernel in program.main.kernels}


@pytest.mark.parametrize("name", kernels_of_the_project())
def test_kernel_of_the_project_needs_no_fibers(name: str) -> None:
    library = compile_library(compiled_kernels()[name], {})
    forms = [kernel.entries.keys() for kernel in library.kernels.values()]
    assert all({"fiber"} == form if name in ON_FIBERS else {"loop", "region"} & form for form in forms)


def test_grid_that_cuts_a_simdgroup_runs_on_fibers() -> None:
    x = np.arange(256, dtype=np.float32)
    source = (
        HEAD
        + """
kernel void k(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  y[i] = simd_sum(x[i]);
}"""
    )
    _, y = run(source, "k", [x, np.zeros(256, np.float32)], (1, 1, 1), (64, 1, 1), grid=(250, 1, 1))
    np.testing.assert_array_equal(y[:224], np.repeat(x.reshape(8, 32).sum(1), 32)[:224])
    np.testing.assert_array_equal(y[224:250], x[224:250].sum())
    assert not y[250:].any()


def test_lanes_exchange_several_values_in_one_loop() -> None:
    """What one exchange gave is used beside what the next one gave: the highest value, and who has it first."""
    x = np.random.default_rng(0).integers(0, 9, 128).astype(np.float32)
    source = (
        HEAD
        + """
kernel void k(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  float best = x[i];
  int place = int(i);
  for (ushort distance = 16; distance > 0; distance /= 2) {
    float other = simd_shuffle_xor(best, distance);
    int there = simd_shuffle_xor(place, distance);
    bool later = (other > best) | ((other == best) & (there < place));
    float value = (later ? other : best);
    int where = (later ? there : place);
    best = value;
    place = where;
  }
  y[i] = float(place);
}"""
    )
    assert "region" in compile_library(source, {}).kernels["k"].entries
    _, y = run(source, "k", [x, np.zeros(128, np.float32)], (4, 1, 1), (32, 1, 1))
    np.testing.assert_array_equal(y, np.repeat(x.reshape(4, 32).argmax(1) + 32 * np.arange(4), 32))


UNSPLIT = {
    "barrier in a loop that threads leave at different times": """
  for (uint i = 0; i < (tid < 128 ? 2u : 3u); ++i) {
    shared[tid] += 1.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
""",
    "barrier inside a function that returns early": "  settle(tid);\n  shared[tid] += 1.0f;\n",
    "barrier inside a template": "  settle_as(1.0f);\n  shared[tid] += 1.0f;\n",
    "barrier inside an expression": "  shared[tid] += 0.0f + settled(1.0f);\n",
    "barrier beside a change": "  shared[tid] += 1.0f, threadgroup_barrier(mem_flags::mem_threadgroup);\n",
    "return of lanes by what they share": "  shared[tid] += 1.0f;\n"
    "  if (tid % 2 == 0) { float s = simd_sum(1.0f); if (s > 3.0f) return; }\n"
    "  simdgroup_barrier(mem_flags::mem_none);\n",
    "collective in the head of a loop": "  for (float i = 0.0f; i < simd_max(1.0f); ++i) shared[tid] += 1.0f;\n",
    "vote": "  if (simd_any(tid == 33)) shared[tid] += 1.0f;\n",
    "collective that is evaluated only sometimes": "  shared[tid] += tid < 500 ? simd_sum(1.0f) : 0.0f;\n",
    "switch": "  switch (tid % 2) { case 0: shared[tid] = 1.0f; break; default: break; }\n",
}


@pytest.mark.parametrize("form", UNSPLIT)
def test_unknown_form_runs_on_fibers(form: str) -> None:
    source = (
        HEAD
        + "inline void settle(uint tid) {\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        + "  if (tid > 900) return;\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n}\n"
        + "template <typename T> inline void settle_as(T x) { threadgroup_barrier(mem_flags::mem_threadgroup); }\n"
        + "inline float settled(float x) { threadgroup_barrier(mem_flags::mem_threadgroup); return x; }\n"
        + "kernel void k(device float* y [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {\n"
        + "  threadgroup float shared[128];\n  shared[tid] = 0.0f;\n"
        + "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        + UNSPLIT[form]
        + "  threadgroup_barrier(mem_flags::mem_threadgroup);\n  y[tid] = shared[127 - tid];\n}\n"
    )
    assert set(pipeline(source, "k").kernel.entries) == {"fiber"}
    (y,) = run(source, "k", [np.zeros(128, np.float32)], (1, 1, 1), (128, 1, 1))
    expected = {
        "barrier in a loop that threads leave at different times": np.full(128, 2.0),
        "barrier inside a function that returns early": np.ones(128),
        "barrier inside a template": np.ones(128),
        "barrier inside an expression": np.ones(128),
        "barrier beside a change": np.ones(128),
        "return of lanes by what they share": np.arange(128) % 2,
        "collective in the head of a loop": np.ones(128),
        "vote": (np.arange(127, -1, -1) // 32 == 1),
        "collective that is evaluated only sometimes": np.full(128, 32.0),
        "switch": np.arange(127, -1, -1) % 2 == 0,
    }
    np.testing.assert_array_equal(y, expected[form])


def test_divergent_barrier_is_reported_with_its_line() -> None:
    source = (
        HEAD
        + """
kernel void k(device float* y [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[tid] = 1.0f;
  if (tid < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    y[tid] = simd_sum(shared[tid]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[tid] = simd_sum(shared[tid]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_barrier(mem_flags::mem_none);
  }
  if (tid == 40) { simdgroup_barrier(mem_flags::mem_none); }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
"""
    )
    with pytest.raises(DeviceError, match=r"kernel 'k', line 17: thread 40 waits .* on line 18"):
        run(source, "k", [np.zeros(64, np.float32)], (1, 1, 1), (64, 1, 1))
