"""Which integers an expression can be: bounds that hold at every position, whatever the tensors hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from npu_compiler.dtypes import BOOL, DType
from npu_compiler.tensor.expr import Call, Checked, Const, Expr, Iota, Load, Reduce, Slot, children, walk
from npu_compiler.tensor.view import View

__all__ = ["Interval", "interval", "view_bounds"]

Interval = tuple[int, int]
"""The lowest and the highest value, both included."""

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "not"})


def view_bounds(view: View) -> Interval:
    """The lowest and the highest offset in its buffer that a view of at least one element reads."""
    reaches = [stride * (size - 1) for size, stride in zip(view.shape, view.strides, strict=True)]
    return view.offset + sum(min(0, reach) for reach in reaches), view.offset + sum(max(0, reach) for reach in reaches)


def interval(
    expr: Expr, tensors: Mapping[int, Interval] | None = None, slots: Sequence[Interval | None] = ()
) -> Interval | None:
    """Bounds of an expression of integers or booleans; None for another one.

    Arithmetic that may wrap around is bounded by its data type alone, and so are tensors.

    Args:
        expr: The expression.
        tensors: Bounds of tensors, by their index in the trace, where they are known.
        slots: Bounds of the numbers of either state, where `expr` is part of a combination.
    """
    stored = tensors or {}
    known: dict[Expr, Interval | None] = {}
    for node in walk(expr):
        limits = _limits(node.dtype)
        if limits is not None and isinstance(node, Load):
            found = stored.get(node.ref.tensor)
        elif limits is not None and isinstance(node, Slot):
            found = slots[node.number % len(slots)]
        else:
            found = None if limits is None else _bounds(node, [known[child] for child in children(node)])
        holds = found is not None and limits is not None and limits[0] <= found[0] and found[1] <= limits[1]
        known[node] = found if holds else limits
    return known[expr]


def _limits(dtype: DType) -> Interval | None:
    """The least and the greatest number that a data type of integers or booleans holds."""
    if dtype == BOOL:
        return 0, 1
    if not dtype.is_integer:
        return None
    bits = 8 * dtype.size
    return (0, (1 << bits) - 1) if dtype.name.startswith("u") else (-(1 << bits - 1), (1 << bits - 1) - 1)


def _bounds(node: Expr, parts: Sequence[Interval | None]) -> Interval | None:
    """Bounds of an expression by those of its parts; None where nothing better than the data type is known."""
    if isinstance(node, Const):
        return int(node.value), int(node.value)
    if isinstance(node, Iota):
        return view_bounds(node.view) if 0 not in node.view.shape else (0, 0)
    if isinstance(node, Checked):
        return min(node.otherwise, 0), max(node.otherwise, node.extent - 1)
    if isinstance(node, Reduce):
        return _kept(node, parts)
    return _call_bounds(node, parts) if isinstance(node, Call) else None


def _kept(reduce: Reduce, parts: Sequence[Interval | None]) -> Interval | None:
    """Bounds of a reduction's state: those of its elements, if two states within them combine to one within them."""
    own = parts[reduce.item]
    both = interval(reduce.combination.values[reduce.item], slots=parts)
    stays = own is not None and both is not None and own[0] <= both[0] and both[1] <= own[1]
    return own if stays and reduce.extent else None


def _call_bounds(call: Call, parts: Sequence[Interval | None]) -> Interval | None:
    if call.fn in _COMPARISONS:
        return 0, 1
    chosen = parts[1:] if call.fn == "where" else parts
    known = [part for part in chosen if part is not None]
    if len(known) != len(chosen):
        return None
    lows, highs = [low for low, _ in known], [high for _, high in known]
    match call.fn:
        case "cast":
            return None if call.dtype == BOOL else known[0]
        case "where":
            return min(lows), max(highs)
        case "add":
            return sum(lows), sum(highs)
        case "sub":
            return lows[0] - highs[1], highs[0] - lows[1]
        case "mul":
            corners = [a * b for a in known[0] for b in known[1]]
            return min(corners), max(corners)
        case "div":  # of integers, rounded towards zero
            return (lows[0] // highs[1], highs[0] // lows[1]) if lows[0] >= 0 and lows[1] > 0 else None
        case "neg":
            return -highs[0], -lows[0]
        case "shr" if min(lows) >= 0:
            return lows[0] >> highs[1], highs[0] >> lows[1]
        case "and" if max(lows) >= 0:  # no more bits than an operand without a sign has
            return 0, min(high for low, high in known if low >= 0)
        case "max":
            return max(lows), max(highs)
        case "min":
            return min(lows), min(highs)
    return None
