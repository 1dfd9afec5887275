"""Equal expressions are one object, in every thread, for as long as anyone holds them and no longer."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import npu_compiler
from benchmarks.compile_time import chain
from npu_compiler.dtypes import BOOL, FLOAT16, FLOAT32, INT64, DType
from npu_compiler.tensor import interning
from npu_compiler.tensor.expr import (
    Call,
    Checked,
    Combination,
    Const,
    Expr,
    Iota,
    Load,
    Reduce,
    Ref,
    Slot,
    children,
    reductions,
    substitute,
    walk,
)
from npu_compiler.tensor.interning import Interned
from npu_compiler.tensor.view import View
from npu_runtime import Device
from tests.support.ir_builder import IRBuilder
from tests.support.running import run_ir

ROW = View((8,), (1,))
SLOTS = (Slot(0, FLOAT32), Slot(1, FLOAT32))
SUM = Combination("total", SLOTS, (Const(0.0, FLOAT32),), (Call("add", SLOTS, FLOAT32),))


def load(tensor: int = 0) -> Load:
    return Load(Ref(tensor, View((4, 8), (8, 1))), FLOAT32)


def examples() -> Iterator[Interned]:
    """One object of each class, made anew."""
    x, position = load(), Iota(ROW, INT64)
    yield from (*SLOTS, SUM, FLOAT32, ROW, Ref(0, ROW), Const(1.5, FLOAT32), position, x)
    yield Load(Ref(0, ROW), FLOAT32, position, 4)
    yield Call("add", (x, Const(0.5, FLOAT32)), FLOAT32)
    yield Reduce(SUM, (x,), 8, FLOAT32)
    yield Checked(position, position, 8, 4, 0, 1, INT64)


def test_equal_objects_are_one() -> None:
    for first, second in zip(list(examples()), examples(), strict=True):
        assert first is second


@pytest.mark.parametrize("node", list(examples()), ids=lambda node: type(node).__name__)
def test_spelled_by_name_it_is_the_same(node: Interned) -> None:
    assert type(node)(**{field.name: getattr(node, field.name) for field in fields(node)}) is node  # type: ignore[arg-type]
    assert replace(node) is node  # type: ignore[type-var]


@pytest.mark.parametrize("node", list(examples()), ids=lambda node: type(node).__name__)
def test_copies_are_the_same(node: Interned) -> None:
    assert copy.copy(node) is copy.deepcopy(node) is pickle.loads(pickle.dumps(node)) is node


def test_what_is_pickled_comes_back_once_it_is_gone() -> None:
    data = pickle.dumps(Call("neg", (load(77),), FLOAT32))
    gc.collect()
    assert pickle.loads(data) is Call("neg", (load(77),), FLOAT32)


def test_numbers_that_python_holds_for_equal_stay_apart() -> None:
    numbers = [1, 1.0, True, 0, 0.0, -0.0, False, float("inf"), float("nan")]
    found = [Const(number, FLOAT32) for number in numbers]
    assert len(set(found)) == len(numbers)
    for node, number in zip(found, numbers, strict=True):
        assert type(node.value) is type(number)
        assert repr(node.value) == repr(number)
    assert Const(float("nan"), FLOAT32) is Const(-float("nan"), FLOAT32)
    assert Const(1.0, FLOAT32) is not Const(1.0, FLOAT16)


def test_what_differs_in_one_field_differs() -> None:
    for node in examples():
        if not isinstance(node, DType):
            changed = [replace(node, **{name: value}) for name, value in _changes(node)]  # type: ignore[type-var]
            assert len({node, *changed}) == 1 + len(changed)


def _changes(node: Interned) -> Iterator[tuple[str, object]]:
    for field in fields(node):  # type: ignore[arg-type]
        value = getattr(node, field.name)
        if isinstance(value, DType):
            yield field.name, BOOL
        elif isinstance(value, int | float):
            yield field.name, value + 1
        elif isinstance(value, str):
            yield field.name, f"{value}_"


def test_rebuilt_by_equal_parts_it_is_the_same_node() -> None:
    x, one = load(), Const(1.0, FLOAT32)
    expr = Call("add", (Call("mul", (x, one), FLOAT32), Reduce(SUM, (x,), 8, FLOAT32)), FLOAT32)
    assert substitute(expr, lambda node: None) is expr
    swapped = substitute(expr, lambda node: load(1) if node is x else None)
    assert swapped is not expr
    assert substitute(swapped, lambda node: x if node is load(1) else None) is expr


def test_a_walk_is_remembered_and_holds_nothing() -> None:
    total = Reduce(SUM, (load(31),), 8, FLOAT32)
    expr = Call("add", (total, total), FLOAT32)
    assert walk(expr) == walk(expr) == (load(31), total, expr)
    assert reductions(expr) == [total]


def test_threads_agree() -> None:
    threads, rounds = 4, 200
    barrier = Barrier(threads)

    def make(_: int) -> list[Expr]:
        made: list[Expr] = []
        for number in range(rounds):
            barrier.wait()  # all make the same new nodes at once
            made.append(Call("add", (load(1000 + number), Const(number + 0.25, FLOAT32)), FLOAT32))
        return made

    with ThreadPoolExecutor(threads) as pool:
        first, *others = pool.map(make, range(threads))
    for other in others:
        assert all(a is b for a, b in zip(first, other, strict=True))


def test_two_threads_compile_the_same_bytes() -> None:
    models = [chain("x - mean(x)", 30), chain("cat(x, x)[2:6]", 30)] * 2
    alone = [npu_compiler.compile(model).to_bytes() for model in models]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda model: npu_compiler.compile(model).to_bytes(), models)) == alone


@pytest.mark.parametrize("target", ["metal", "cuda"])
def test_compiling_leaves_nothing_behind(target: str) -> None:
    npu_compiler.compile(chain("x + silu(x)", 10), target=target)
    gc.collect()
    before = interning.count()
    for length in range(2, 52):
        npu_compiler.compile(chain("x + silu(x)", length), target=target)
    gc.collect()
    assert interning.count() <= before + 20  # layouts of a few sizes that are remembered


def test_a_long_chain_is_let_go_at_once() -> None:
    gc.collect()
    before = interning.count()
    expr: Expr = load(5)
    for number in range(20_000):
        expr = Call("add", (expr, Const(number, FLOAT32)), FLOAT32)
    assert interning.count() >= before + 40_000
    del expr
    gc.collect()
    assert interning.count() <= before


def test_the_same_sum_of_two_spellings_is_computed_once() -> None:
    """A variance beside a mean reduces the row twice, not three times: the mean of both is one expression."""
    builder = IRBuilder()
    x = builder.input("x", (4, 16))
    means = [builder.call("aten.mean.dim", x, [-1], True) for _ in range(2)]
    first, second = (builder.call("aten.sub.Tensor", x, mean) for mean in means)
    ir = builder.build(builder.call("aten.mul.Tensor", first, second))
    (kernel,) = npu_compiler.compile(ir).main.kernels
    assert kernel.text.count("simd_sum(") == 1
    given = torch.linspace(-2, 3, 64).reshape(4, 16)
    (result,) = run_ir(ir, {"x": given}, Device("software-metal"))
    expected = (given.double() - given.double().mean(-1, keepdim=True)) ** 2
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-3, atol=2e-3)


def test_a_column_is_read_where_it_is_summed_and_where_it_is_repeated() -> None:
    """One load, inside of a reduction over its single element and along a row of many: it stays in its place."""
    builder = IRBuilder()
    x, column = builder.input("x", (4, 64)), builder.input("column", (4, 1))
    alone = builder.call("aten.sum.dim_IntList", column, [1], True)
    scaled = builder.call("aten.mul.Tensor", x, column)
    total = builder.call("aten.sum.dim_IntList", scaled, [1], True)
    ir = builder.build(builder.call("aten.add.Tensor", builder.call("aten.add.Tensor", scaled, alone), total))
    given = {"x": torch.linspace(-1, 1, 256).reshape(4, 64), "column": torch.linspace(-2, 2, 4).reshape(4, 1)}
    (result,) = run_ir(ir, given, Device("software-metal"))
    values, factor = (tensor.double() for tensor in given.values())
    expected = values * factor + factor + (values * factor).sum(1, keepdim=True)
    np.testing.assert_allclose(result, expected.numpy(), rtol=2e-3, atol=2e-2)


@given(data=st.data())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_order_of_a_walk_does_not_depend_on_what_was_walked_before(data: st.DataObject) -> None:
    """Operands first, from left to right, each node once; parts that were walked by themselves included."""
    nodes: list[Expr] = [load(tensor) for tensor in range(3)]
    for _ in range(data.draw(st.integers(1, 12))):
        args = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3))
        nodes.append(Call("add", tuple(args), FLOAT32))
        if data.draw(st.booleans()):
            walk(data.draw(st.sampled_from(nodes)))
    order: dict[Expr, None] = {}

    def visit(node: Expr) -> None:
        for child in children(node):
            visit(child)
        order.setdefault(node)

    visit(nodes[-1])
    assert walk(nodes[-1]) == tuple(order)
