"""The problems that the core builds of a trace, and the forms in which they get their operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.convolution import Convolution
from npu_compiler.lowering.problems.forms import Computed
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.pooling import Divisor, Pooling
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.problems.scatter import ScatterRows
from npu_compiler.lowering.problems.windows import Windows
from tests.support.ir_builder import IRBuilder
from tests.support.reference_target import Planned, ReferenceTarget, plan_ir


class Storing(ReferenceTarget):
    """A target whose kernels load all operands from memory."""

    def loads(self, group: Group, position: int, operand: Operand) -> bool:
        return False


def problem_of(op: str, shapes: list[tuple[int, ...]], *args: Any) -> Problem:
    """The problem of a model that is one op."""
    builder = IRBuilder()
    inputs = [builder.input(f"x{number}", shape) for number, shape in enumerate(shapes)]
    plan = plan_ir(builder.build(builder.call(op, *inputs, *args)), Storing())
    (problem,) = (group.problem for group in plan.groups if group.problem is not None)
    return problem


POOLINGS: list[tuple[str, tuple[Any, ...], Windows, tuple[bool, bool, Divisor]]] = [
    (
        "max_pool2d",
        ([3, 2], [2, 1], [1, 0], [1, 2]),
        Windows((3, 2), (2, 1), (1, 0), (1, 2)),
        (True, False, Divisor.ONE),
    ),
    ("avg_pool2d", ([2, 2],), Windows((2, 2), (2, 2), (0, 0), (1, 1)), (False, False, Divisor.PADDED)),
    (
        *("avg_pool2d", ([3, 3], [1, 1], [1, 1], False, False)),
        *(Windows((3, 3), (1, 1), (1, 1), (1, 1)), (False, False, Divisor.INSIDE)),
    ),
    ("adaptive_avg_pool2d", ([3, 4],), Windows((3, 2), (1, 1), (0, 0), (1, 1)), (False, True, Divisor.PADDED)),
]


@pytest.mark.parametrize(("op", "args", "windows", "kind"), POOLINGS, ids=[case[0] for case in POOLINGS])
def test_a_pooling(op: str, args: tuple[Any, ...], windows: Windows, kind: tuple[bool, bool, Divisor]) -> None:
    problem = problem_of(f"aten.{op}.default", [(2, 5, 7, 6)], *args)
    assert isinstance(problem, Pooling)
    assert problem.windows == windows
    assert (problem.maximum, problem.adaptive, problem.divisor) == kind


def test_a_pooling_whose_divisor_is_given_is_a_sum() -> None:
    problem = problem_of("aten.avg_pool2d.default", [(1, 2, 4, 4)], [2, 2], [2, 2], [0, 0], False, True, 3)
    assert isinstance(problem, Pooling)
    assert problem.divisor is Divisor.ONE
    assert not problem.maximum


def test_a_convolution_in_groups() -> None:
    args = (None, [2, 1], [1, 0], [1, 2], 2)
    problem = problem_of("aten.conv2d.default", [(3, 4, 9, 8), (6, 2, 3, 2)], *args)
    assert isinstance(problem, Convolution)
    assert problem.shape == (3, 6, 5, 6)
    assert problem.windows == Windows((3, 2), (2, 1), (1, 0), (1, 2))
    assert (problem.groups, problem.outputs, problem.channels) == (2, 3, 2)
    assert (problem.depth, problem.pixels, problem.flops) == (12, 90, 2 * 90 * 6 * 12)
    assert (problem.windows.span(0, 1), problem.windows.span(0, 4), problem.windows.span(1, 4)) == (3, 9, 6)


def test_batches_of_a_product_are_merged_where_both_operands_allow() -> None:
    problem = problem_of("aten.matmul.default", [(2, 3, 4, 5), (2, 3, 5, 6)])
    assert isinstance(problem, Product)
    assert (problem.m, problem.n, problem.k, problem.batch) == (4, 6, 5, (6,))
    assert (problem.a.along, problem.a.k, problem.a.batch) == (5, 1, (20,))
    assert (problem.b.along, problem.b.k, problem.b.batch) == (1, 6, (30,))
    assert problem_of("aten.matmul.default", [(2, 3, 4, 5), (3, 5, 6)]).operands[1].strides[0] == 0


def test_a_dimension_of_one_element_takes_the_stride_that_suits() -> None:
    problem = problem_of("aten.mm.default", [(7, 1), (1, 3)])
    assert isinstance(problem, Product)
    assert (problem.a.along, problem.a.k) == (1, 1)
    assert (problem.b.along, problem.b.k) == (1, 3)
    one = problem_of("aten.mm.default", [(1, 8), (8, 3)])
    assert isinstance(one, Product)
    assert (one.a.along, one.a.k) == (0, 1)


def planned(target: ReferenceTarget) -> Planned:
    """A product of a softmax and of a rectified matrix, turned."""
    builder = IRBuilder()
    x, y = builder.input("x", (6, 8)), builder.input("y", (6, 8))
    left = builder.call("aten.softmax.int", x, -1)
    right = builder.call("aten.t.default", builder.call("aten.relu.default", y))
    return plan_ir(builder.build(builder.call("aten.mm.default", left, right)), target)


@pytest.mark.parametrize("target", [ReferenceTarget(), Storing()], ids=["computed", "stored"])
def test_operands_are_computed_where_the_target_loads_that_and_stored_elsewhere(target: ReferenceTarget) -> None:
    plan = planned(target)
    (product,) = (group.problem for group in plan.groups if group.problem is not None)
    forms = [(type(operand), isinstance(operand, Computed) and operand.is_of_rows) for operand in product.operands]
    if isinstance(target, Storing):
        assert forms == [(Operand, False), (Operand, False)]
        assert len(plan.groups) == 3
    else:
        assert forms == [(Computed, True), (Computed, False)]
        assert len(plan.groups) == 1
        assert product.stored().reads() == tuple(operand.tensor.index for operand in product.operands)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn((6, 8), generator=generator, dtype=torch.float64) for _ in range(2))
    (result,) = plan.run({"x": x, "y": y})
    np.testing.assert_allclose(result, (torch.softmax(x, -1) @ F.relu(y).T).numpy(), rtol=1e-9, atol=1e-12)


def test_rows_that_are_combined() -> None:
    builder = IRBuilder()
    x, rows = builder.input("x", (2, 5, 3)), builder.input("rows", (2, 7, 3))
    index = builder.input("index", (7,), torch.int64)
    plan = plan_ir(builder.build(builder.call("aten.index_add.default", x, 1, index, rows)), Storing())
    (problem,) = (group.problem for group in plan.groups if group.problem is not None)
    assert isinstance(problem, ScatterRows)
    assert (problem.shape, problem.count, problem.how, problem.include_self) == ((2, 5, 3), 7, "sum", True)
    assert problem.base is not None
    given = [torch.randn(2, 5, 3).double(), torch.randn(2, 7, 3).double(), torch.tensor([4, 0, 0, 1, 4, 4, 2])]
    (result,) = plan.run(dict(zip(("x", "rows", "index"), given, strict=True)))
    np.testing.assert_allclose(result, given[0].index_add(1, given[2], given[1]).numpy())
