"""Rounding to codes in few operations gives the codes that rounding gives, halves and limits included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_compiler.short_codes import shortened
from npu_compiler.dtypes import BOOL, FLOAT32, INT8, INT16, UINT8, DType
from npu_compiler.tensor.evaluate import evaluate
from npu_compiler.tensor.expr import Call, Const, Expr, Load, Ref, substitute, walk
from npu_compiler.tensor.rounded import rounded_code, simplified
from npu_compiler.tensor.view import View

_HALVES = np.arange(-1200, 1200, dtype=np.float32) / 4
_FAR = np.array([-np.inf, -1e30, -1e9, -40000.5, 40000.5, 1e9, 1e30, np.inf], np.float32)
_NUMBERS = np.concatenate([_HALVES, _FAR])
_KINDS = [
    (INT8, -128, 127, 0),
    (INT8, -128, 127, -128),
    (INT8, -127, 127, 5),
    (INT8, -128, 127, 127),
    (INT8, -5, 9, 3),
    (UINT8, 0, 255, 0),
    (UINT8, 0, 255, 128),
    (UINT8, 0, 255, 255),
]
each_kind = pytest.mark.parametrize(("dtype", "low", "high", "zero"), _KINDS, ids=str)


def _load(tensor: int, count: int = len(_NUMBERS)) -> Load:
    return Load(Ref(tensor, View((count,), (1,))), FLOAT32)


def _values(expr: Expr, *memory: Any) -> Any:
    return evaluate(expr, (len(memory[0]),), lambda index: memory[index])


def _times(number: Expr, scale: float) -> Expr:
    return Call("mul", (number, Const(scale, FLOAT32)), FLOAT32)


def _relu(number: Expr) -> Expr:
    zero = Const(0, FLOAT32)
    return Call("where", (Call("lt", (number, zero), BOOL), zero, number), FLOAT32)


def test_a_relu_is_the_greater_of_two_and_keeps_nan() -> None:
    numbers = np.append(_NUMBERS, np.float32("nan"))
    relu = _relu(_load(0, len(numbers)))
    made = shortened(relu)
    assert [node.fn for node in walk(made) if isinstance(node, Call)] == ["max"]
    np.testing.assert_array_equal(_values(relu, numbers), _values(made, numbers))
    other = Call("where", (Call("lt", (_load(0), Const(1, FLOAT32)), BOOL), Const(1, FLOAT32), _load(0)), FLOAT32)
    assert shortened(other) is other


def _code(number: Expr, dtype: DType, low: int, high: int, zero: int) -> Expr:
    made = rounded_code(number, zero, (low, high), dtype)
    assert made is not None
    return made


def _simplest(expr: Expr) -> Expr:
    return substitute(expr, simplified)


@each_kind
def test_codes_are_rounded_and_limited(dtype: DType, low: int, high: int, zero: int) -> None:
    expr = _code(_load(0), dtype, low, high, zero)
    expected = np.clip(np.rint(_NUMBERS) + zero, low, high)
    np.testing.assert_array_equal(_values(expr, _NUMBERS), expected)
    np.testing.assert_array_equal(_values(shortened(expr), _NUMBERS), expected)


@each_kind
def test_numbers_of_codes_are_not_made_into_codes(dtype: DType, low: int, high: int, zero: int) -> None:
    number = Call("cast", (_code(_load(0), dtype, low, high, zero),), FLOAT32)
    expr = _simplest(_times(Call("sub", (number, Const(zero, FLOAT32)), FLOAT32), 0.5))
    assert not any(node.dtype.is_integer for node in walk(expr))
    expected = (np.clip(np.rint(_NUMBERS) + zero, low, high) - zero) / 2
    np.testing.assert_array_equal(_values(expr, _NUMBERS), expected)
    np.testing.assert_array_equal(_values(shortened(expr), _NUMBERS), expected)


def test_a_relu_ahead_of_codes_from_zero_is_their_limit() -> None:
    expr = _simplest(_code(_times(_relu(_load(0)), 0.5), UINT8, 0, 255, 0))
    assert not any(isinstance(node, Call) and node.fn == "where" for node in walk(expr))
    np.testing.assert_array_equal(_values(expr, _NUMBERS), np.clip(np.rint(_NUMBERS / 2), 0, 255))


@pytest.mark.parametrize(("scale", "zero"), [(-0.5, 0), (0.5, 7)])
def test_a_relu_stays_where_no_limit_is_its_own(scale: float, zero: int) -> None:
    expr = _simplest(_code(_times(_relu(_load(0, len(_HALVES))), scale), UINT8, 0, 255, zero))
    expected = np.clip(np.rint(np.maximum(_HALVES, 0) * scale) + zero, 0, 255)
    np.testing.assert_array_equal(_values(expr, _HALVES), expected)


@each_kind
def test_sums_of_scaled_numbers_are_scaled_once(dtype: DType, low: int, high: int, zero: int) -> None:
    """As a shortcut's are; with powers of two nothing but codes is rounded."""
    first, second = _load(0, len(_HALVES)), _load(1, len(_HALVES))
    summed = Call("add", (_times(first, 0.5), _times(second, 2.0)), FLOAT32)
    expr = shortened(_code(_times(summed, 0.5), dtype, low, high, zero))
    other = np.roll(_HALVES, 7)
    expected = np.clip(np.rint(_HALVES / 4 + other) + zero, low, high)
    np.testing.assert_array_equal(_values(expr, _HALVES, other), expected)


def test_other_scales_move_codes_only_next_to_halves() -> None:
    numbers = np.random.default_rng(0).uniform(-300, 300, 100_000).astype(np.float32)
    expr = shortened(_code(_times(_load(0, len(numbers)), 0.7), INT8, -128, 127, -6))
    exact = numbers.astype(np.float64) * np.float32(0.7)
    moved = _values(expr, numbers) != np.clip(np.rint(exact) - 6, -128, 127)
    assert np.all(np.abs(exact[moved] % 1 - 0.5) < 2**-15)


def test_codes_that_no_two_bytes_hold_have_another_way() -> None:
    assert rounded_code(_load(0), 0, (-200, 100), INT8) is None
    assert rounded_code(_load(0), 1 << 20, (0, 255), UINT8) is None
    wide = _code(_load(0), INT16, -(1 << 15), (1 << 15) - 1, 0)
    assert shortened(wide) is wide
