"""Functions of MSL against numpy in double, in units of the last place."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from tests.software_gpu.harness import HEAD, Array, compile_error, run

Function = Callable[..., Array]
COUNT = 1 << 15


def spread(low: float, high: float) -> Array:
    return np.random.default_rng(0).uniform(low, high, COUNT).astype(np.float32)


def magnitudes(smallest: float, largest: float) -> Array:
    rng = np.random.default_rng(1)
    return np.exp(rng.uniform(np.log(smallest), np.log(largest), COUNT)).astype(np.float32)


SIGNED = np.concatenate([magnitudes(1e-30, 50.0), -magnitudes(1e-30, 50.0)])[::2]
UNARY: dict[str, tuple[Function, Array, float]] = {
    "exp": (np.exp, spread(-104, 88.7), 2),
    "exp2": (np.exp2, spread(-149, 127.9), 2),
    "log": (np.log, magnitudes(1e-45, 3e38), 2),
    "log2": (np.log2, magnitudes(1e-45, 3e38), 2),
    "log10": (np.log10, magnitudes(1e-45, 3e38), 2),
    "sin": (np.sin, spread(-1e5, 1e5), 1),
    "cos": (np.cos, spread(-1e5, 1e5), 1),
    "tan": (np.tan, spread(-1e5, 1e5), 1),
    "asin": (np.arcsin, spread(-1, 1), 5),
    "acos": (np.arccos, spread(-1, 1), 5),
    "atan": (np.arctan, SIGNED, 3),
    "sinh": (np.sinh, SIGNED, 3),
    "cosh": (np.cosh, SIGNED, 1),
    "tanh": (np.tanh, SIGNED, 2),
    "sqrt": (np.sqrt, magnitudes(1e-38, 3e38), 0.5),
    "rsqrt": (lambda x: 1 / np.sqrt(x), magnitudes(1e-38, 3e38), 2),
    "floor": (np.floor, spread(-100, 100), 0),
    "ceil": (np.ceil, spread(-100, 100), 0),
    "trunc": (np.trunc, spread(-100, 100), 0),
    "rint": (np.rint, np.round(spread(-100, 100) * 2) / 2, 0),
    "round": (lambda x: np.trunc(x + np.copysign(0.5, x)), np.round(spread(-100, 100) * 2) / 2, 0),
    "precise::exp": (np.exp, spread(-10, 10), 2),
    "fast::tanh": (np.tanh, spread(-10, 10), 2),
}
BINARY: dict[str, tuple[Function, Array, Array, float]] = {
    "pow": (np.power, magnitudes(1e-4, 1e4), spread(-9, 9), 1),
    "atan2": (np.arctan2, spread(-9, 9), spread(-9, 9)[::-1].copy(), 4),
    "fmod": (np.fmod, spread(-1e4, 1e4), magnitudes(1e-2, 1e3), 0),
    "max": (np.fmax, spread(-9, 9), spread(-9, 9)[::-1].copy(), 0),
    "min": (np.fmin, spread(-9, 9), spread(-9, 9)[::-1].copy(), 0),
    "copysign": (np.copysign, spread(-9, 9), spread(-9, 9)[::-1].copy(), 0),
}


def kernel_text(name: str, expression: str, result: str) -> str:
    return (
        f"kernel void {name}(device const float* xs [[buffer(0)]], device const float* ys [[buffer(1)]], "
        f"device {result}* out [[buffer(2)]], uint i [[thread_position_in_grid]]) "
        f"{{ float x = xs[i], y = ys[i]; out[i] = {expression}; }}\n"
    )


def evaluate(name: str, x: Array, y: Array) -> Array:
    """The expression of that name for each pair of elements."""
    out = np.zeros(x.size, np.float32)
    return run(source_of_all(), name, [x, y, out], (1, 1, 1), (256, 1, 1), grid=(x.size, 1, 1))[-1]


def units_in_last_place(actual: Array, expected: Array) -> float:
    step = np.spacing(np.maximum(np.abs(expected).astype(np.float32), np.float32(1.2e-38))).astype(np.float64)
    return float(np.max(np.abs(actual.astype(np.float64) - expected) / step))


@functools.cache
def source_of_all() -> str:
    """One source with a kernel for each expression of the tables: compiled once."""
    texts = [HEAD]
    texts += [kernel_text(kernel_name(name), f"{name}(x)", "float") for name in UNARY]
    texts += [kernel_text(kernel_name(name), f"{name}(x, y)", "float") for name in BINARY]
    texts += [kernel_text(kernel_name(expression), expression, "float") for expression in SPECIAL]
    return "".join(texts)


def kernel_name(expression: str) -> str:
    return "of_" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in expression)


@pytest.mark.parametrize("name", UNARY)
def test_function_of_one_argument(name: str) -> None:
    reference, x, bound = UNARY[name]
    assert units_in_last_place(evaluate(kernel_name(name), x, x), reference(x.astype(np.float64))) <= bound


@pytest.mark.parametrize("name", BINARY)
def test_function_of_two_arguments(name: str) -> None:
    reference, x, y, bound = BINARY[name]
    expected = reference(x.astype(np.float64), y.astype(np.float64))
    assert units_in_last_place(evaluate(kernel_name(name), x, y), expected) <= bound


INF, NAN = np.inf, np.nan
SPECIAL: dict[str, dict[float, float]] = {
    "exp(x)": {INF: INF, -INF: 0.0, 100.0: INF, -200.0: 0.0, NAN: NAN, 0.0: 1.0},
    "log(x)": {0.0: -INF, -1.0: NAN, INF: INF, NAN: NAN, 1.0: 0.0},
    "log2(x)": {0.0: -INF, -1.0: NAN, INF: INF, 8.0: 3.0},
    "sin(x)": {0.0: 0.0, INF: NAN, NAN: NAN},
    "tanh(x)": {INF: 1.0, -INF: -1.0, NAN: NAN, 0.0: 0.0},
    "atan(x)": {INF: float(np.float32(np.pi / 2)), -INF: -float(np.float32(np.pi / 2)), NAN: NAN},
    "pow(x, 2.0f)": {-3.0: 9.0, INF: INF, 0.0: 0.0},
    "pow(x, 3.0f)": {-2.0: -8.0, -INF: -INF},
    "pow(x, 0.5f)": {-2.0: NAN, 4.0: 2.0, 0.0: 0.0},
    "pow(x, 0.0f)": {NAN: 1.0, 0.0: 1.0, -3.0: 1.0},
    "pow(x, -1.0f)": {0.0: INF, INF: 0.0, 4.0: 0.25},
    "max(x, 1.0f)": {NAN: 1.0, -INF: 1.0, 2.0: 2.0},
    "min(1.0f, x)": {NAN: 1.0, INF: 1.0, -2.0: -2.0},
    "rsqrt(x)": {0.0: INF, INF: 0.0, -1.0: NAN},
    "fmod(x, 3.0f)": {7.0: 1.0, -7.0: -1.0, INF: NAN},
    "sign(x)": {-2.5: -1.0, 0.0: 0.0, 2.5: 1.0},
    "saturate(x)": {-2.5: 0.0, 0.25: 0.25, 2.5: 1.0},
    "fract(x)": {2.75: 0.75, -0.25: 0.75},
    "mix(x, 10.0f, 0.5f)": {2.0: 6.0},
    "select(x, 5.0f, x < 0.0f)": {-1.0: 5.0, 1.0: 1.0},
    "clamp(x, -1.0f, 1.0f)": {3.0: 1.0, -3.0: -1.0, 0.5: 0.5},
    "step(1.0f, x)": {0.5: 0.0, 1.0: 1.0},
    "float(isnan(x)) + 2.0f * float(isinf(x)) + 4.0f * float(isfinite(x))": {NAN: 1.0, -INF: 2.0, 3.0: 4.0},
    "float(popcount(uint(x)) + clz(uint(x)) + ctz(uint(x)))": {12.0: 2 + 28 + 2},
    "float(as_type<uint>(x) >> 23)": {1.0: 127.0},
    "dot(float3(x, 2.0f, 1.0f), float3(x))": {3.0: 18.0},
    "length(float2(x, 4.0f))": {3.0: 5.0},
    "float4(half4(x)).wzyx.z + float(vec<half, 2>(half(x)).y)": {1.5: 3.0},
    "float(vec<half, 4>(half(1), half(x), half(2), half(3)).y)": {1.5: 1.5},
    "numeric_limits<half>::max() + x": {0.0: 65504.0},
    "float(0.1h) * x": {1.0: float(np.float16(0.1))},
    "0.1 * x": {1.0: float(np.float32(0.1))},
    "float(bfloat(x))": {1.00390625: 1.0, 3.0: 3.0},
    "as_type<float>(as_type<int>(x) | 1)": {1.0: float(np.nextafter(np.float32(1), np.float32(2)))},
}


@pytest.mark.parametrize("expression", SPECIAL)
def test_special_values(expression: str) -> None:
    expected = SPECIAL[expression]
    x = np.array(list(expected), np.float32)
    np.testing.assert_array_equal(
        evaluate(kernel_name(expression), x, x), np.array(list(expected.values()), np.float32)
    )


def test_half_arithmetic_rounds_after_each_operation() -> None:
    x = magnitudes(1e-2, 10.0).astype(np.float16)
    source = HEAD + (
        "kernel void k(device const half* x [[buffer(0)]], device half* y [[buffer(1)]], "
        "uint i [[thread_position_in_grid]]) { half square = x[i] * x[i]; y[i] = square + x[i]; }"
    )
    y = run(source, "k", [x, np.zeros_like(x)], (1, 1, 1), (256, 1, 1), grid=(x.size, 1, 1))[-1]
    np.testing.assert_array_equal(y, x * x + x)


def test_there_is_no_error_function() -> None:
    source = HEAD + "kernel void k(device float* y [[buffer(0)]]) { y[0] = erf(y[0]); }"
    assert "erf" in compile_error(source)
