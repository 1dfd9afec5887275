"""Norms without a launch: the factor of a row waits for the epilogue of the product that reads it.

``(x * factor(x) * gain) @ w`` is ``((x * gain) @ w) * factor(x)``, as a row's factor may be multiplied by ahead of
sums along the row or behind them. So what stores x stores ``x * gain`` as well, and sums of parts of its rows, of which
the epilogue behind the next product makes the factor: that of an RMS norm is a function of a sum of squares.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from npu_compiler.dtypes import FLOAT32
from npu_compiler.lowering.grouping import Group, Loads
from npu_compiler.lowering.problems.forms import Unscaled
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.row_alignment import realign_rows, reshaped
from npu_compiler.lowering.schedule import Dataflow
from npu_compiler.lowering.value import MAX_READS
from npu_compiler.records import changed
from npu_compiler.tensor.expr import (
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    has_reduce,
    leaves,
    reductions,
    reindex,
    substitute,
)
from npu_compiler.tensor.symbolic import Trace
from npu_compiler.tensor.trace import Beside, TracedTensor

__all__ = ["PART", "with_factors_behind"]

PART = 32
"""Neighbours of a row whose sum is stored as one: few enough for every tile of columns to have whole parts."""


def with_factors_behind(
    groups: Mapping[int, list[Group]], trace: Trace, outputs: Collection[int], loads: Loads
) -> dict[int, list[Group]]:
    """Groups without norms between products, where the target can store and load what takes their place.

    The tensor of such a norm then holds its rows without their factors.

    Args:
        groups: What computes each tensor.
        trace: The trace; sums of parts of rows are added to it.
        outputs: Tensors that must be stored as they are.
        loads: Whether a group's launches can load an operand of a form.
    """
    flow, result = Dataflow(groups, outputs), dict(groups)
    readers: dict[int, list[int]] = {}
    for group in flow.needed:
        for index in group.reads():
            readers.setdefault(index, []).append(group.output.index)
    for norm in flow.needed:
        halves = _Halves.of(norm) if norm.output.index not in outputs else None
        makers = [] if halves is None else result.get(halves.source, [])
        if halves is None or len(makers) != 1 or not halves.fits(norm, makers[0], trace.tensors[halves.source]):
            continue
        found = [result[index] for index in readers[norm.output.index]]
        if not all(len(each) == 1 and _takes(each[0], norm, makers[0], loads) for each in found):
            continue
        element = realign_rows(halves.element, norm.shape[:-1], makers[0].shape[:-1])
        read = {load.ref.tensor for load in leaves(halves.element)} - {halves.source}
        if element is None or not read.isdisjoint(groups):
            continue  # what is computed may have to be made of the source first
        maker, factor = _with_followers(makers[0], norm, changed(halves, element=element), trace)
        behind = [_with_factor(reader, norm, factor) for (reader,) in found]
        if all(len(group.reads()) <= MAX_READS for group in (maker, *behind)):
            result |= {index: [group] for group in (maker, *behind) for index in group.stores()}
    return result


@dataclass(frozen=True)
class _Halves:
    """A norm as a product of what it makes of each element and of a factor for each row.

    Attributes:
        element: Over the norm's shape.
        factor: A function of sums over rows of one tensor.
        source: The index of that tensor.
    """

    element: Expr
    factor: Expr
    source: int

    @classmethod
    def of(cls, group: Group) -> _Halves | None:
        """The halves of what a group computes; None where it is something else."""
        if group.problem is not None or group.index is not None or group.beside is not None:
            return None
        element, factor = _split(group.expr)
        sums = [] if factor is None else reductions(factor)
        added = {load.ref.tensor for each in sums for load in leaves(each)}
        whole = all(each.combination.function == "add" and each.extent == group.shape[-1] for each in sums)
        nested = any(has_reduce(arg) for each in sums for arg in each.args)
        if element is None or factor is None or has_reduce(element) or len(added) != 1 or nested or not whole:
            return None
        return cls(element, factor, *added)

    def fits(self, norm: Group, maker: Group, source: TracedTensor) -> bool:
        """Whether a group computes the source around a product, its rows those of the norm."""
        kept = maker.index is None and maker.added is None and maker.pairs == 1 and not maker.followers
        if not kept or not isinstance(maker.problem, Product) or norm.shape[-1] % PART:
            return False
        stored, seen = reshaped(source.view, maker.shape), reshaped(source.view, norm.shape)
        if stored is None or seen is None or maker.shape[-1] != norm.shape[-1] or not maker.view.same_elements(stored):
            return False
        read = [load for load in (*leaves(self.element), *leaves(self.factor)) if load.ref.tensor == source.index]
        return all(load.index is None and load.ref.view.same_elements(seen) for load in read)


def _split(expr: Expr) -> tuple[Expr | None, Expr | None]:
    """An expression as a product of one without reductions, and of one of sums alone; either is None where it is 1.

    Conversions that only round are left out. What is no such product comes first as it is.
    """
    if not has_reduce(expr):
        return expr, None
    if isinstance(expr, Call) and expr.fn == "cast" and expr.dtype.is_float and expr.args[0].dtype.is_float:
        return _split(expr.args[0])
    if isinstance(expr, Call) and expr.fn in ("mul", "div"):
        (left, factor), (right, by) = map(_split, expr.args)
        if expr.fn == "mul":
            return _times(left, right), _times(factor, by)
        if right is None:
            return left, Call("div", (factor or Const(1.0, FLOAT32), expr.args[1]), FLOAT32)
    summed = {load for each in reductions(expr) for load in leaves(each)}
    return (None, expr) if summed.issuperset(leaves(expr)) else (expr, None)


def _times(left: Expr | None, right: Expr | None) -> Expr | None:
    return left or right if left is None or right is None else Call("mul", (left, right), FLOAT32)


def _takes(reader: Group, norm: Group, maker: Group, loads: Loads) -> bool:
    """Whether a group multiplies the rows of a norm, and its epilogue can multiply by their factors."""
    problem = reader.problem
    if not isinstance(problem, Product) or reader.times_read(norm.output.index) != 1:
        return False
    rows = problem.operands[0]
    whole = reshaped(norm.output.view, rows.shape)
    if type(rows) is not Operand or rows.tensor != norm.output or whole is None or not rows.view.same_elements(whole):
        return False
    same = rows.shape[:-1] == problem.shape[:-1] and rows.shape[-1] == norm.shape[-1]
    return same and loads(reader, 0, Unscaled(rows.tensor, rows.ref, maker))


def _with_followers(maker: Group, norm: Group, halves: _Halves, trace: Trace) -> tuple[Group, Expr]:
    """The group that stores the halves of a norm as well, and the factor as what reads these, over the norm's rows.

    Args:
        maker: What computes the source.
        norm: The norm.
        halves: Its halves, the elements over the shape of `maker`.
        trace: The trace.
    """
    rows, parts = maker.shape[:-1], maker.shape[-1] // PART
    followers = [_follower(norm, norm.output, halves.element, maker.shape)]
    stored: dict[Expr, Expr] = {}
    for each in reductions(halves.factor):
        assert isinstance(each, Reduce)
        own = trace.add(norm.output.name, (*rows, parts), FLOAT32, "plain", Beside(maker.output.ref)).placed()
        in_order = realign_rows(each.args[0], norm.shape[:-1], rows)
        summed = in_order and reindex(in_order, maker.shape, (("reshape", (*rows, parts, PART)),))
        read = own.apply(("reshape", (*norm.shape[:-1], parts)))
        assert summed is not None  # `fits` has seen that rows lie side by side
        assert read is not None
        total = Reduce(each.combination, (summed,), PART, each.dtype)
        followers.append(_follower(norm, trace.tensors[own.tensor], total, (*rows, parts, 1)))
        stored[each] = Reduce(each.combination, (Load(read, FLOAT32),), parts, each.dtype)
    nodes = tuple(dict.fromkeys((*maker.nodes, *norm.nodes)))
    return changed(maker, followers=tuple(followers), nodes=nodes), substitute(halves.factor, stored.get)


def _follower(norm: Group, output: TracedTensor, expr: Expr, shape: tuple[int, ...]) -> Group:
    view = output.view.reshape(shape)
    assert view is not None  # a tensor of its own
    return Group(output, None, expr, shape, view, norm.nodes)


def _with_factor(reader: Group, norm: Group, factor: Expr) -> Group:
    """A group whose epilogue multiplies sums by the factor of their row."""
    assert reader.problem is not None
    aligned = realign_rows(factor, norm.shape[:-1], reader.problem.shape[:-1])
    assert aligned is not None
    own = [load for load in leaves(reader.expr) if load.ref.tensor == reader.problem.result.index]
    products: dict[Expr, Expr] = {load: Call("mul", (load, aligned), FLOAT32) for load in own}
    return changed(reader, expr=substitute(reader.expr, products.get))
