"""Conditions under which parts of an expression are evaluated, and whether they hold for whole packs of elements."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.lowering.operands import Walks
from npu_compiler.tensor.expr import Call, Const, Expr, Iota, Load, children, walk

__all__ = ["Guard", "conditions", "is_uniform"]

Guard = tuple[Expr, bool]
"""A condition, and whether it must be true or false."""

_LOGIC = ("and", "or", "not")
_BOUNDS = ("lt", "ge")


def conditions(exprs: Sequence[Expr]) -> dict[Expr, dict[Guard, None]]:
    """For each sub-expression, in order, what holds wherever it is evaluated: the `where`s whose side it is on."""
    held: dict[Expr, dict[Guard, None]] = {}
    for expr in exprs:
        held[expr] = {}
        for node in reversed(walk(expr)):
            for position, child in enumerate(children(node)):
                own = dict(held[node])
                if isinstance(node, Call) and node.fn == "where" and position > 0:
                    own[node.args[0], position == 1] = None
                before = held.get(child, own)
                held[child] = {guard: None for guard in own if guard in before}
    return held


def is_uniform(condition: Expr, walks: Walks, axis: int, size: int) -> bool:
    """Whether a condition on positions has one value for each `size` neighbours along an axis."""
    moving: set[Expr] = set()  # along the axis
    varying: set[Expr] = set()  # among neighbours, as far as is known
    for node in walk(condition):
        if isinstance(node, Load):
            return False
        if isinstance(node, Iota):
            if walks[node][axis]:
                moving.add(node)
                varying.add(node)
            continue
        if moving.isdisjoint(children(node)):
            continue
        moving.add(node)
        logic = isinstance(node, Call) and node.fn in _LOGIC and varying.isdisjoint(children(node))
        bound = isinstance(node, Call) and node.fn in _BOUNDS and _is_bound(node, walks, axis, size)
        if not logic and not bound:
            varying.add(node)
    return condition not in varying


def _is_bound(condition: Call, walks: Walks, axis: int, size: int) -> bool:
    """Whether a position is compared with a border between packs."""
    position, border = condition.args
    while isinstance(position, Call) and position.fn == "cast":
        (position,) = position.args
    if not isinstance(position, Iota) or not isinstance(border, Const) or not isinstance(border.value, int):
        return False
    strides = list(walks[position])
    along = strides.pop(axis)
    return along == 1 and all(number % size == 0 for number in (*strides, position.view.offset, border.value))
