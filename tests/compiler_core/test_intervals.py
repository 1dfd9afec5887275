"""Bounds of expressions: true of every value, and tight enough that known positions are not checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npu_compiler
from npu_compiler.dtypes import BOOL, FLOAT32, INT8, INT32, INT64, UINT8, DType
from npu_compiler.ops.reduction import greatest, least, product, total
from npu_compiler.tensor.expr import Call, Checked, Const, Expr, Iota, Load, Reduce, Ref
from npu_compiler.tensor.intervals import interval, view_bounds
from npu_compiler.tensor.reducing import Reduction
from npu_compiler.tensor.symbolic import Trace
from npu_compiler.tensor.view import View
from tests.support.evaluate import evaluate, positions
from tests.support.ir_builder import IRBuilder
from tests.support.reference_target import ReferenceTarget

SHAPE = (3, 4)


def iota(*strides: int, offset: int = 0) -> Iota:
    return Iota(View(SHAPE, strides, offset), INT64)


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> Expr:
    """Arithmetic of positions and constants."""
    if not depth or draw(st.booleans()):
        number = st.integers(-9, 9)
        return draw(
            st.one_of(
                number.map(lambda value: Const(value, INT64)),
                st.tuples(number, number, number).map(lambda n: iota(n[0], n[1], offset=n[2])),
            )
        )
    a, b = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    fn = draw(st.sampled_from(["add", "sub", "mul", "neg", "max", "min", "abs", "where"]))
    if fn == "where":
        return Call(fn, (Call("lt", (a, b), BOOL), a, b), INT64)
    return Call(fn, (a,) if fn in ("neg", "abs") else (a, b), INT64)


@given(expressions())
def test_holds_for_every_position(expr: Expr) -> None:
    found = interval(expr)
    assert found is not None
    values = evaluate(expr, SHAPE, lambda _: np.empty(0))
    assert found[0] <= values.min() <= values.max() <= found[1]


@given(st.integers(-5, 5), st.integers(-5, 5), st.integers(-50, 50))
def test_of_a_view_is_exact(first: int, second: int, offset: int) -> None:
    view = View(SHAPE, (first, second), offset)
    where = positions(view)
    assert view_bounds(view) == (where.min(), where.max())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (UINT8, (0, 255)),
        (INT8, (-128, 127)),
        (INT32, (-(2**31), 2**31 - 1)),
        (INT64, (-(2**63), 2**63 - 1)),
        (BOOL, (0, 1)),
        (FLOAT32, None),
    ],
)
def test_a_tensor_is_as_wide_as_its_data_type(dtype: DType, expected: tuple[int, int] | None) -> None:
    load = Load(Ref(5, View(SHAPE, (4, 1))), dtype)
    assert interval(load) == expected
    if expected is not None:
        assert interval(load, {5: (1, 1)}) == (1, 1)


def test_what_may_wrap_around_is_as_wide_as_its_data_type() -> None:
    load = Load(Ref(0, View(SHAPE, (4, 1))), INT8)
    assert interval(Call("add", (load, Const(1, INT8)), INT8)) == (-128, 127)
    assert interval(Call("add", (Call("cast", (load,), INT64), Const(1, INT64)), INT64)) == (-127, 128)


def test_a_checked_index_is_inside() -> None:
    load = Load(Ref(0, View(SHAPE, (4, 1))), INT64)
    assert interval(Checked(load, iota(4, 1), 12, 7, 0, 0, INT64)) == (0, 6)
    assert interval(Checked(load, iota(4, 1), 12, 7, -1, 0, INT64)) == (-1, 6)


@pytest.mark.parametrize(
    ("reduction", "expected"), [(greatest, (0, 11)), (least, (0, 11)), (total, None), (product, None)]
)
def test_a_reduction_that_chooses_stays_within_its_elements(
    reduction: Reduction, expected: tuple[int, int] | None
) -> None:
    combination = reduction.combination((INT64,), Trace(ReferenceTarget()))
    limits = (-(2**63), 2**63 - 1)
    assert interval(Reduce(combination, (iota(4, 1),), 4, INT64)) == (expected or limits)


def test_the_place_of_an_extremum_is_inside_and_needs_no_check() -> None:
    builder = IRBuilder()
    x, table = builder.input("x", (5, 7)), builder.input("table", (7, 3))
    place = builder.call("aten.argmax.default", x, 1)
    program = npu_compiler.compile(builder.build(builder.call("aten.index_select.default", table, 0, place)))
    assert not program.main.checks
