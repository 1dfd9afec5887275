"""Rows under another shape: a kernel over rows [a, b, n] computes what reduces the same rows as [a * b, n]."""

from __future__ import annotations

from math import prod
from typing import TypeVar

from npu_compiler.tensor.expr import Expr, Iota, Load, Ref, substitute
from npu_compiler.tensor.view import Step, View

__all__ = ["column_step", "expands", "realign_rows", "reshaped"]


def expands(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to another one."""
    own = (1,) * (len(shape) - len(given)) + given
    return len(own) == len(shape) and all(size in (1, wanted) for size, wanted in zip(own, shape, strict=True))


def reshaped(view: View, shape: tuple[int, ...]) -> View | None:
    """The view's elements, in row-major order, as a view of `shape`; None where counts differ, or strides can't."""
    return view.reshape(shape) if prod(view.shape) == prod(shape) else None


_Read = TypeVar("_Read", Ref, View)


def realign_rows(expr: Expr, old: tuple[int, ...], new: tuple[int, ...]) -> Expr | None:
    """An expression over [*old, n] as one over [*new, n], where `new` is another shape of the same rows in order.

    Args:
        expr: The expression; it may reduce along n.
        old: The shape without the last dimension.
        new: Another with the same product.

    Returns:
        The expression, or None where strides cannot say an operand under the new shape.
    """
    failed = False

    def moved(read: _Read, shape: tuple[int, ...]) -> _Read:
        nonlocal failed
        width = shape[-1] if shape else 1
        expanded = read.apply(("expand", (*old, width)))
        result = None if expanded is None else expanded.apply(("reshape", (*new, width)))
        failed |= result is None
        return result or read

    def rewrite(node: Expr) -> Expr | None:
        if isinstance(node, Load):
            return Load(moved(node.ref, node.ref.view.shape), node.dtype, node.index, node.index_stride)
        return Iota(moved(node.view, node.view.shape), node.dtype) if isinstance(node, Iota) else None

    if old == new:
        return expr
    result = substitute(expr, rewrite)
    return None if failed else result


def column_step(load: Load, own: View, pairs: int) -> tuple[Step, ...] | None:
    """How a load of the anchor's result sees it: as it is, or every other column; None for any other way."""
    if load.index is not None:
        return None
    if pairs == 1:
        return () if load.ref.view.same_elements(own) else None
    last = len(own.shape) - 1
    for start in (0, 1):
        if load.ref.view.same_elements(own.slice(last, start, own.shape[-1] // 2, 2)):
            return (("slice", (last, start, own.shape[-1] // 2, 2)),)
    return None
