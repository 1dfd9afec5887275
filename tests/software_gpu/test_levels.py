"""Processor levels: the same bits at each, and nothing left to a library that no one provides.

A level without fused instructions (x86-64, x86-64-v2) computes `a*b+c` with two roundings: exact fusing would take over
ten instructions for each product of a matrix. So it is compared with the machine's own level told to do the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from npu_compiler import CompiledProgram
from npu_runtime import Device
from software_gpu import processor
from software_gpu.library import Execution, compile_for
from software_gpu.processor import ENVIRONMENT_VARIABLE, LEVELS, NATIVE, missing_features
from tests.metal import test_attention, test_convolution, test_matmul, test_paired_columns, test_pooling, test_prologue
from tests.metal.graphs import Graph
from tests.ops import elementwise_cases
from tests.software_gpu import test_kernels, test_math
from tests.software_gpu.harness import HEAD, Array, read_kernels, run

UNFUSED = "native without fused instructions"
RUN = ["x86-64-v2", "x86-64-v3"]
RUNNABLE = [name for name in RUN if not missing_features(LEVELS[name])]
COMPILED = [name for name in LEVELS if name not in RUNNABLE]
# What has fewer instructions needs more of a library's: of the other machine the least. Sample kernels compile for all.
LEAST_ELSEWHERE = ["generic"]
# Whole graphs, and mathematics, run at the least level of the machine as well, in place of the second, at which
# `make test-levels` runs them with all of their cases.
LEAST_AND_THIRD = ["x86-64", "x86-64-v3"]
HALF, BFLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="this machine runs none of the levels that are compared")


@pytest.fixture(autouse=True)
def unfused_level(monkeypatch: pytest.MonkeyPatch) -> None:
    own = processor.processor(NATIVE)
    flags = (*own.flags, "-DMSL_UNFUSED", "-ffp-contract=off")
    monkeypatch.setitem(LEVELS, UNFUSED, dataclasses.replace(own, name=UNFUSED, flags=flags))


@contextmanager
def at(level: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, level)
        yield


def same_bits_at_every_level(compute: Callable[[], list[Array]], levels: Sequence[str] = RUN) -> list[Array]:
    """What `compute` gives at the machine's own level, if those of the levels that it can run give the same bits."""
    results = {}
    runnable = [name for name in levels if not missing_features(LEVELS[name])]
    for level in (NATIVE, UNFUSED, *runnable):
        with at(level):
            results[level] = compute()
    for level in runnable:
        expected = results[NATIVE if LEVELS[level].fuses else UNFUSED]
        for got, wanted in zip(results[level], expected, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8), err_msg=level)
    return results[NATIVE]


def compile_at_other_levels(source: str, levels: Sequence[str]) -> None:
    for level in levels:
        compile_for(level, source, {})


def in_type(source: str, dtype: np.dtype[Any]) -> str:
    """A sample source, which computes in half, in another type."""
    return source if dtype == HALF else re.sub(r"\b([\d.]+)h\b", r"\1f", source.replace("half", "bfloat"))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["half", "bfloat"])
@pytest.mark.parametrize("kind", ["fast", "fibers", "check"])
def test_sample_kernels(kind: str, dtype: np.dtype[Any]) -> None:
    for name, case in test_kernels.CASES.items():
        if kind != "fast" and name not in ("softmax", "matmul_simdgroup", "silu"):
            continue
        source = in_type(read_kernels(case.source), dtype)
        arguments = [a if isinstance(a, bytes) else a.astype(dtype) for a in case.arguments]

        def compute(case: Any = case, source: str = source, arguments: Any = arguments) -> list[Array]:
            return run(source, case.kernel, arguments, case.groups, case.threads, kind=kind, grid=case.grid)

        same_bits_at_every_level(compute)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["half", "bfloat"])
@pytest.mark.parametrize("execution", [Execution.FAST, Execution.CHECKED])
@pytest.mark.parametrize("level", COMPILED)
def test_sample_kernels_compile_for_processors_that_are_not_here(
    level: str, execution: Execution, dtype: np.dtype[Any]
) -> None:
    for name in ("rows", "matmul", "pointwise"):
        compile_for(level, in_type(read_kernels(name), dtype), {}, execution=execution)


def test_mathematics() -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate([np.exp(rng.uniform(-60, 60, 2000)), rng.uniform(-9, 9, 2000)]).astype(np.float32)
    y = rng.permutation(x)
    x[:6] = np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42
    names = [*map(test_math.kernel_name, test_math.UNARY), *map(test_math.kernel_name, test_math.BINARY)]
    same_bits_at_every_level(lambda: [canonical(test_math.evaluate(name, x, y)) for name in names], LEAST_AND_THIRD)
    compile_at_other_levels(test_math.source_of_all(), LEAST_ELSEWHERE)


def canonical(values: Array) -> Array:
    """NaN of one kind: whose sign and payload survive arithmetic, no two processors agree on."""
    return np.where(np.isnan(values), np.float32(np.nan), values)


CONVERT = (
    HEAD
    + """
kernel void narrow(device const float* x [[buffer(0)]], device {0}* y [[buffer(1)]], uint i [[thread_position_in_grid]])
{{
    y[i] = {0}(x[i]);
}}
kernel void widen(device const {0}* x [[buffer(0)]], device float* y [[buffer(1)]], uint i [[thread_position_in_grid]])
{{
    y[i] = float(x[i]);
}}
kernel void narrow4(device const float4* x [[buffer(0)]], device {0}4* y [[buffer(1)]],
                    uint i [[thread_position_in_grid]])
{{
    y[i] = {0}4(x[i]);
}}
kernel void operations(device const {0}* x [[buffer(0)]], device {0}* y [[buffer(1)]], device uint* z [[buffer(2)]],
                       uint i [[thread_position_in_grid]])
{{
    {0} a = x[i], b = x[i + 1];
    {0}4 v = {0}4(a, b, -a, abs(b));
    v = v * v - a / v + max(v, {0}4(b));
    y[8 * i] = a + b;
    y[8 * i + 1] = a * b + a;
    y[8 * i + 2] = -a;
    y[8 * i + 3] = clamp(a, ({0})-1.5f, ({0})2.0f);
    y[8 * i + 4] = {0}(int(i) - 300) * copysign(a, b);
    y[8 * i + 5] = v.x + v.z;
    y[8 * i + 6] = dot(v.xyz, v.wzy);
    y[8 * i + 7] = a < b ? {0}(i) : {0}(ulong(i) << 3);
    z[i] = uint(a > b) + 2 * uint(isnan(a)) + 4 * uint(floor(abs(a)));
}}
"""
)


def floats_of_every_kind() -> Array:
    """Floats around every value of 16 bits: each of them, its neighbours, and what lies between two of them."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    bits = [upper + np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    bits += [halves + np.uint32(step) for step in (0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001)]
    return np.concatenate(bits).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["half", "bfloat"])
def test_conversions(dtype: np.dtype[Any]) -> None:
    source = CONVERT.format("half" if dtype == HALF else "bfloat")
    x = floats_of_every_kind()
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(all="ignore"):
        rounded, exact = x.astype(dtype), every.astype(np.float32)

    def compute() -> list[Array]:
        size = (x.size, 1, 1)
        narrow = run(source, "narrow", [x, np.zeros_like(rounded)], (1, 1, 1), (256, 1, 1), grid=size)[-1]
        size = (x.size // 4, 1, 1)
        narrow4 = run(source, "narrow4", [x, np.zeros_like(rounded)], (1, 1, 1), (256, 1, 1), grid=size)[-1]
        widen = run(source, "widen", [every, np.zeros_like(exact)], (1, 1, 1), (256, 1, 1), grid=(every.size, 1, 1))[-1]
        return [narrow, narrow4, widen]

    narrow, narrow4, widen = same_bits_at_every_level(compute)
    for result, expected in ((narrow, rounded), (narrow4, rounded), (widen, exact)):
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(result), nan)
        unsigned = np.uint16 if result.dtype.itemsize == 2 else np.uint32
        np.testing.assert_array_equal(result.view(unsigned)[~nan], expected.view(unsigned)[~nan])


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=["half", "bfloat"])
def test_operations_of_small_types(dtype: np.dtype[Any]) -> None:
    source = CONVERT.format("half" if dtype == HALF else "bfloat")
    x = (np.random.default_rng(4).standard_normal(1025) * 4).astype(dtype)
    blank = [np.zeros(8 * 1024, dtype), np.zeros(1024, np.uint32)]

    def compute() -> list[Array]:
        return run(source, "operations", [x, *blank], (1, 1, 1), (256, 1, 1), grid=(1024, 1, 1))

    _, y, _ = same_bits_at_every_level(compute)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(y[::8], x[:-1] + x[1:])
    np.testing.assert_array_equal(y[2::8], -x[:-1])
    compile_at_other_levels(source, COMPILED)


def test_fma_rounds_once_everywhere() -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(1 << 16).astype(np.float32) for _ in range(2))
    with np.errstate(all="ignore"):
        c = (-(a * b) * rng.choice([1, 1e-7, 1e7, 1 + 2**-23], a.size)).astype(np.float32)
    a[:4], b[:3], c[:2] = np.inf, (0.0, 1.0, 1e30), (1.0, -np.inf)
    source = HEAD + (
        "kernel void k(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device const float* c "
        "[[buffer(2)]], device float* y [[buffer(3)]], uint i [[thread_position_in_grid]]) "
        "{ y[i] = fma(a[i], b[i], c[i]); }"
    )
    results = {}
    for level in (NATIVE, UNFUSED, *RUNNABLE):
        with at(level):
            arrays = [a, b, c, np.zeros_like(a)]
            results[level] = run(source, "k", arrays, (1, 1, 1), (256, 1, 1), grid=(a.size, 1, 1))[-1]
    for level, result in results.items():
        expected = canonical(results[NATIVE])
        np.testing.assert_array_equal(canonical(result).view(np.uint32), expected.view(np.uint32), err_msg=level)


class _Levels:
    """Runs the graphs of other tests at every level and compares bits; compiles their kernels for the lowest levels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run_graph = Graph.run

        def run_everywhere(graph: Graph, program: CompiledProgram, _: Device) -> list[torch.Tensor]:
            results: list[list[torch.Tensor]] = []

            def compute() -> list[Array]:
                results.append(run_graph(graph, program, Device("software-metal")))
                return [canonical(result.numpy()) for result in results[-1]]

            same_bits_at_every_level(compute, LEAST_AND_THIRD)
            for function in program.functions.values():
                for kernel in function.kernels:
                    compile_at_other_levels(kernel.text, LEAST_ELSEWHERE)
            return results[0]

        monkeypatch.setattr(Graph, "run", run_everywhere)


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> _Levels:
    return _Levels(monkeypatch)


BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat"])


@BOTH
def test_products(levels: _Levels, dtype: torch.dtype) -> None:
    test_matmul.test_linear_with_epilogue("residual+gelu", dtype)
    for layout in ("rows", "columns"):
        test_matmul.test_vector_times_matrix(257, 2048, layout, dtype)
    test_paired_columns.test_gated_activation(65, 37, 24, dtype)
    test_prologue.test_one_row(test_prologue.rms_norm, 64, 200, dtype)


@BOTH
def test_convolutions_and_pools(levels: _Levels, dtype: torch.dtype) -> None:
    for name in ("3x3", "few channels", "depthwise", "odd groups"):
        test_convolution.test_shapes(name, dtype)
    test_pooling.test_max_pool(next(iter(test_pooling.MAXIMUM)), dtype)
    test_pooling.test_adaptive_avg_pool((7, 9), (3, 2), dtype)


@BOTH
def test_attentions(levels: _Levels, dtype: torch.dtype) -> None:
    test_attention.test_head_sizes(64, 1, 70, dtype)
    test_attention.test_head_sizes(128, 33, 50, dtype)
    if dtype == torch.bfloat16:
        test_attention.test_long_cache(40, "boolean")


@BOTH
def test_arithmetic_and_rows(levels: _Levels, dtype: torch.dtype) -> None:
    """Every function of one tensor that lowers to arithmetic, in one kernel each; reductions over rows.

    Functions are computed in float, whatever is loaded and stored: one in eight shows bfloat's loads and stores.
    """
    graph = Graph(dtype)
    x = graph.input(3, 40)
    functions = [case.op.removeprefix("aten.") for case in elementwise_cases.UNARY if not case.args[1:]]
    outputs = [graph.call(name, x) for name in functions[:: 8 if dtype == torch.bfloat16 else 1]]
    graph.check(*outputs, roundings=64)
    graph = Graph(dtype)
    x = graph.input(6, 300)
    graph.check(
        graph.call("softmax.int", x, -1),
        graph.call("sum.dim_IntList", x, [-1]),
        graph.call("amax", x, [-1]),
        test_prologue.layer_norm(graph, x),
        roundings=4,
    )


# Of values that show a rounding: what is an operation of bfloat, what of float.
MEANINGS = {
    "float(b * b)": lambda b, f, i: (b * b).astype(np.float32),
    "float(b * i)": lambda b, f, i: (b * i.astype(BFLOAT)).astype(np.float32),
    "float(-b)": lambda b, f, i: -b.astype(np.float32),
    "b * f": lambda b, f, i: b.astype(np.float32) * f,
    "f - b": lambda b, f, i: f - b.astype(np.float32),
    "float(i > 1 ? b : bfloat(f))": lambda b, f, i: np.where(i > 1, b, f.astype(BFLOAT)).astype(np.float32),
    "i > 1 ? b : f": lambda b, f, i: np.where(i > 1, b.astype(np.float32), f),
    "float(b > f) + float(b == b) + float(i > b)": lambda b, f, i: (
        (b.astype(np.float32) > f) + np.float32(1) + (i.astype(BFLOAT) > b)
    ),
    "float(max(b, bfloat(f)))": lambda b, f, i: np.maximum(b, f.astype(BFLOAT)).astype(np.float32),
    "float(bfloat4(f, b, f, f).y)": lambda b, f, i: b.astype(np.float32),
    "float4(bfloat4(float4(f, float(b), f, f))).x": lambda b, f, i: f.astype(BFLOAT).astype(np.float32),
    "float(half(b)) + float(int(b))": lambda b, f, i: (
        b.astype(np.float32).astype(np.float16).astype(np.float32) + b.astype(np.int32).astype(np.float32)
    ),
    "float(as_type<ushort>(b))": lambda b, f, i: b.view(np.uint16).astype(np.float32),
    "float(bfloat(16777217 + i))": lambda b, f, i: (16777217 + i).astype(np.float32).astype(BFLOAT).astype(np.float32),
}


@pytest.mark.parametrize("expression", MEANINGS)
def test_an_expression_with_bfloat_means_one_thing_however_it_is_compiled(expression: str) -> None:
    """With the type that is only moved and converted, where that is enough, and with clang's."""
    source = HEAD + (
        "kernel void k(device const bfloat* x [[buffer(0)]], device const float* z [[buffer(1)]], "
        "device float* y [[buffer(2)]], uint at [[thread_position_in_grid]]) "
        f"{{ bfloat b = x[at]; float f = z[at]; int i = int(at) + 1; y[at] = {expression}; }}"
    )
    b = (1 + np.arange(64, dtype=np.float32) / 64).astype(BFLOAT)
    f = (1 + np.arange(64, dtype=np.float32) / 300).astype(np.float32)
    i = np.arange(1, 65, dtype=np.int32)
    (_, _, result) = run(source, "k", [b, f, np.zeros_like(f)], (1, 1, 1), (64, 1, 1))
    np.testing.assert_array_equal(result, MEANINGS[expression](b, f, i).astype(np.float32))
