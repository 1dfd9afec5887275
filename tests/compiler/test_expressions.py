"""Op definitions evaluated by numpy against torch: what an op means, without a kernel."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from npu_compiler.dtypes import BOOL, FLOAT32
from npu_compiler.ops import definition
from npu_compiler.ops.reduction import total
from npu_compiler.tensor.expr import (
    FUNCTIONS,
    Call,
    Const,
    Iota,
    Load,
    Reduce,
    Ref,
    has_reduce,
    leaves,
    reindex,
    substitute,
)
from npu_compiler.tensor.symbolic import Trace
from npu_compiler.tensor.view import View
from tests.ops import (
    elementwise_cases,
    indexing_cases,
    norm_cases,
    pointwise_cases,
    reduction_cases,
    sort_cases,
    views_cases,
)
from tests.ops.cases import Case
from tests.support.evaluate import apply_definition, evaluate
from tests.support.ir_builder import overload_of
from tests.support.reference_target import ReferenceTarget

CASES = [
    case
    for cases in (
        elementwise_cases.CASES,
        pointwise_cases.CASES,
        views_cases.CASES,
        reduction_cases.CASES,
        reduction_cases.MEANINGS,
        indexing_cases.CASES,
        norm_cases.NORMS,
        norm_cases.LOSSES,
        sort_cases.SEARCHED,
    )
    for case in cases
    if not case.refusal and "index_copy" not in case.op
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_definition_means_what_torch_means(case: Case) -> None:
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    tensors = [operand.tensor(generator, torch.float64) for operand in case.operands()]
    expected = case.expected(tensors)
    results = _call(case, tensors)
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.shape == tuple(wanted.shape)
        loose = wanted.dtype != torch.float64 or "rms_norm" in case.op  # whose default epsilon is the dtype's own
        np.testing.assert_allclose(result, wanted.numpy(), rtol=1e-6 if loose else 1e-12, atol=1e-12)


def _call(case: Case, tensors: list[torch.Tensor]) -> list[np.ndarray]:
    """The definition on the case's arguments, bound by the schema's names."""
    rest = iter(tensors)

    def argument(value: object) -> object:
        if isinstance(value, list):
            return [argument(item) for item in value]
        if isinstance(value, torch.dtype):
            return str(value)
        if not hasattr(value, "views"):
            return value
        tensor = next(rest)
        for op, attrs in value.views:
            tensor = overload_of(op)(tensor, *attrs)
        return tensor

    entry = definition(case.op)
    assert entry is not None
    names = [a.name for a in overload_of(case.op)._schema.arguments]
    given = {name: argument(value) for name, value in zip(names, case.args, strict=False)}
    given |= {name: argument(value) for name, value in case.kwargs.items()}
    return apply_definition(case.op, **given)


def _load(shape: tuple[int, ...], strides: tuple[int, ...]) -> Load:
    return Load(Ref(0, View(shape, strides)), FLOAT32)


_SUM = total.combination((FLOAT32,), Trace(ReferenceTarget()))


def test_a_sum_over_the_last_dimension() -> None:
    total = Reduce(_SUM, (_load((2, 3), (3, 1)),), 3, FLOAT32)
    scaled = Call("div", (_load((2, 3), (3, 1)), total), FLOAT32)
    memory = np.arange(6.0)
    expected = memory.reshape(2, 3) / memory.reshape(2, 3).sum(1, keepdims=True)
    np.testing.assert_allclose(evaluate(scaled, (2, 3), lambda _: memory), expected)
    assert has_reduce(scaled)


def test_reindexing_applies_views_to_every_leaf() -> None:
    expr = Call("add", (_load((2, 3), (3, 1)), Iota(View((3,), (1,)), FLOAT32)), FLOAT32)
    turned = reindex(expr, (2, 3), (("permute", (1, 0)), ("slice", (0, 1, 2, 1))))
    assert turned is not None
    memory = np.arange(6.0)
    expected = (memory.reshape(2, 3) + np.arange(3)).T[1:3]
    np.testing.assert_array_equal(evaluate(turned, (2, 2), lambda _: memory), expected)


def test_reindexing_a_reduction_is_refused() -> None:
    total = Reduce(_SUM, (_load((2, 3), (3, 1)),), 3, FLOAT32)
    assert reindex(total, (2, 1), (("permute", (1, 0)),)) is None


def test_substitution_keeps_what_it_does_not_change() -> None:
    load = _load((3,), (1,))
    expr = Call("mul", (load, Const(2.0, FLOAT32)), FLOAT32)
    assert substitute(expr, lambda _: None) is expr
    replaced = substitute(expr, lambda node: Const(5.0, FLOAT32) if node is load else None)
    assert not list(leaves(replaced))
    assert evaluate(replaced, (), lambda _: np.empty(0)) == 10.0


@pytest.mark.parametrize("name", ["max", "min"])
def test_extrema_of_the_table_keep_a_nan_of_the_first_operand(name: str) -> None:
    """Numpy's meaning keeps either operand's; the definitions rely on the first alone."""
    assert np.isnan(FUNCTIONS[name].numpy(np.nan, 1.0))


def test_a_condition_is_boolean() -> None:
    chosen = Call("where", (Const(True, BOOL), Const(1.0, FLOAT32), Const(2.0, FLOAT32)), FLOAT32)
    assert evaluate(chosen, (2,), lambda _: np.empty(0)).tolist() == [1.0, 1.0]
