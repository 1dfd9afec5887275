"""A kernel that reads more tensors than a device binds becomes several, each of which writes a part of the output.

So does ``cat`` of many tensors: a choice among them by position, which is cut where one tensor's positions end.
"""

from __future__ import annotations

from npu_compiler.dtypes import BOOL
from npu_compiler.integers import ceil_div
from npu_compiler.tensor.expr import Call, Const, Expr, Iota, leaves, reindex, substitute, walk
from npu_compiler.tensor.view import View

__all__ = ["in_parts"]


def in_parts(expr: Expr, view: View, most_reads: int) -> list[tuple[Expr, View]]:
    """Divides what a kernel computes until each part reads few enough tensors.

    Args:
        expr: The value at each position of `view`.
        view: Where the values go.
        most_reads: How many tensors a part may read.

    Returns:
        The parts in order. One reads more where no choice by position divides it.
    """
    pending, parts = [(_simplified(expr, view.shape), view)], []
    while pending:
        expr, view = pending.pop()
        halves = _halves(expr, view, most_reads) if _reads(expr) > most_reads else None
        if halves is None:
            parts.append((expr, view))
        else:
            pending.extend(reversed(halves))
    return parts


def _reads(expr: Expr) -> int:
    return len({load.ref.tensor for load in leaves(expr)})


def _halves(expr: Expr, view: View, most_reads: int) -> list[tuple[Expr, View]] | None:
    """Both sides of a border between choices, so that as few parts as can be are left to cut; None without a border."""
    dim, borders = max(_borders(expr, view.shape).items(), key=lambda item: len(item[1]), default=(0, []))
    if not borders:
        return None
    choices = len(borders) + 1
    first = ceil_div(choices, most_reads) // 2 * most_reads or choices // 2
    border = borders[first - 1]
    halves = []
    for start, length in ((0, border), (border, view.shape[dim] - border)):
        step = (dim, start, length, 1)
        half, there = reindex(expr, view.shape, (("slice", step),)), view.slice(*step)
        if half is None:
            return None
        halves.append((_simplified(half, there.shape), there))
    return halves


def _borders(expr: Expr, shape: tuple[int, ...]) -> dict[int, list[int]]:
    """By dimension, the positions at which a comparison changes its result, in order."""
    found: dict[int, set[int]] = {}
    for node in walk(expr):
        compared = _compared(node)
        if compared is None:
            continue
        view, number = compared[0].view.expand(shape), compared[1]
        moving = [dim for dim, stride in enumerate(view.strides) if stride > 0 and shape[dim] > 1]
        if len(moving) != 1 or any(stride < 0 for stride in view.strides):
            continue
        border = ceil_div(number - view.offset, view.strides[moving[0]])
        if 0 < border < shape[moving[0]]:
            found.setdefault(moving[0], set()).add(border)
    return {dim: sorted(borders) for dim, borders in found.items()}


def _compared(node: Expr) -> tuple[Iota, int] | None:
    """The position and the number of a comparison ``position < number``, or ``position >= number``."""
    if not isinstance(node, Call) or node.fn not in ("lt", "ge"):
        return None
    position, number = node.args
    if isinstance(position, Iota) and isinstance(number, Const) and isinstance(number.value, int):
        return position, number.value
    return None


def _simplified(expr: Expr, shape: tuple[int, ...]) -> Expr:
    """`expr` without the choices that are the same at all positions of `shape`."""

    def rewrite(node: Expr) -> Expr | None:
        compared = _compared(node)
        if compared is not None:
            assert isinstance(node, Call)
            below = _is_below(compared[0].view.expand(shape), compared[1])
            return None if below is None else Const(below if node.fn == "lt" else not below, BOOL)
        if isinstance(node, Call) and node.fn == "where" and isinstance(node.args[0], Const):
            return node.args[1] if node.args[0].value else node.args[2]
        return None

    return substitute(expr, rewrite)


def _is_below(view: View, number: int) -> bool | None:
    """Whether all positions are below a number, or none of them; None where some are."""
    ends = [stride * (size - 1) for size, stride in zip(view.shape, view.strides, strict=True)]
    if view.offset + sum(max(0, end) for end in ends) < number:
        return True
    return False if view.offset + sum(min(0, end) for end in ends) >= number else None
