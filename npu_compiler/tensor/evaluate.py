"""Evaluates scalar expressions by numpy: what a kernel computes, without a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import FLOAT32, DType
from npu_compiler.tensor.expr import FUNCTIONS, Call, Checked, Combination, Const, Expr, Iota, Load, Reduce, Slot
from npu_compiler.tensor.view import View

__all__ = ["IndexFault", "evaluate", "positions", "read_view", "registers"]

Array = NDArray[Any]
Memory = Callable[[int], Array]
Registers = Callable[[DType], np.dtype[Any]]


class IndexFault(Exception):
    """An index beyond its tensor: the number of its check, the element of the index tensor, and the value."""

    def __init__(self, check: int, element: int, value: int) -> None:
        super().__init__(check, element, value)
        self.check, self.element, self.value = check, element, value


def registers(kind: DType) -> np.dtype[Any]:
    """What numbers of a data type are computed in: half precisions in float32, which is rounded when it is stored."""
    return np.dtype(np.float32) if kind.is_float and kind.size < FLOAT32.size else np.dtype(kind.numpy)


def positions(view: View) -> Array:
    """For each element of a view where it lies in its buffer; int64 of `view.shape`."""
    result = np.full(view.shape, view.offset, np.int64)
    for dim, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        result += (np.arange(size) * stride).reshape((-1, *(1,) * (len(view.shape) - dim - 1)))
    return result


def read_view(buffer: Array, where: Array) -> Array:
    """Elements of a flat buffer; outside of it lies NaN, and a number that no one expects for other types."""
    outside = (where < 0) | (where >= len(buffer))
    if not len(buffer):
        return np.full(where.shape, np.nan)
    values: Array = buffer[np.where(outside, 0, where)]
    if not outside.any():
        return values
    is_float = values.dtype.kind not in "biu"  # those of ml_dtypes are of a kind of their own
    return np.where(outside, values.dtype.type(np.nan if is_float else 77), values)


def evaluate(expr: Expr, shape: tuple[int, ...], memory: Memory, held_in: Registers = registers) -> Array:
    """The value of `expr` at each position.

    Args:
        expr: An expression over `shape`.
        shape: The iteration space. What `expr` reduces, it reduces over the last dimension.
        memory: Gives the flat buffer of each tensor of the trace.
        held_in: The type of numpy that numbers of a data type are computed in.

    Raises:
        IndexFault: An index lies beyond its tensor.
    """
    return np.broadcast_to(_Evaluation(memory, held_in).value(expr, shape), shape)


class _Evaluation:
    def __init__(self, memory: Memory, held_in: Registers, state: Sequence[Array] = ()) -> None:
        self.memory, self.held_in, self.state = memory, held_in, state
        self._known: dict[tuple[Expr, tuple[int, ...]], Array] = {}

    def value(self, expr: Expr, shape: tuple[int, ...]) -> Array:
        key = (expr, shape)
        if key not in self._known:
            with np.errstate(all="ignore"):
                self._known[key] = self._compute(expr, shape)
        return self._known[key]

    def _compute(self, expr: Expr, shape: tuple[int, ...]) -> Array:
        if isinstance(expr, Const):
            return np.asarray(expr.value, self.held_in(expr.dtype))
        if isinstance(expr, Iota):
            return positions(expr.view.expand(shape)).astype(self.held_in(expr.dtype))
        if isinstance(expr, Load):
            where = positions(expr.ref.view.expand(shape))
            if expr.index is not None:
                where = where + self.value(expr.index, shape).astype(np.int64) * expr.index_stride
            return read_view(self.memory(expr.ref.tensor), where).astype(self.held_in(expr.dtype), copy=False)
        if isinstance(expr, Reduce):
            inner = (*shape[:-1], expr.extent)
            state = [np.broadcast_to(self.value(arg, inner), inner) for arg in expr.args]
            return self._reduced(expr.combination, state)[expr.item].astype(self.held_in(expr.dtype))
        if isinstance(expr, Slot):
            return self.state[expr.number]
        if isinstance(expr, Checked):
            return self._checked(expr, shape)
        args = [self.value(arg, shape) for arg in expr.args]
        if expr.fn == "div" and expr.dtype.is_integer:
            return _whole_quotient(args[0], args[1]).astype(self.held_in(expr.dtype))
        result = args[0] if expr.fn == "cast" else FUNCTIONS[expr.fn].numpy(*args)
        return self._converted(np.asarray(result), expr)

    def _checked(self, expr: Checked, shape: tuple[int, ...]) -> Array:
        """Both sides of a `where` are computed here, also where there is no such element of the index tensor."""
        index = np.broadcast_to(self.value(expr.index, shape), shape)
        element = np.broadcast_to(self.value(expr.element, shape), shape)
        inside = (index >= 0) & (index < expr.extent)
        wrong = ~inside & (element >= 0) & (element < expr.elements)
        if wrong.any():
            raise IndexFault(expr.check, int(element[wrong][0]), int(index[wrong][0]))
        return np.where(inside, index, expr.otherwise)

    def _reduced(self, combination: Combination, state: list[Array]) -> list[Array]:
        """The state of each row [..., 1] by the numbers of its elements [..., n]: halves are combined until one is
        left.
        """
        if not state[0].shape[-1]:
            alone = zip(state, combination.identity, strict=True)
            return [np.full((*numbers.shape[:-1], 1), const.value, numbers.dtype) for numbers, const in alone]
        while state[0].shape[-1] > 1:
            half = state[0].shape[-1] // 2
            left, right = ([numbers[..., start : start + half] for numbers in state] for start in (0, half))
            steps = _Evaluation(_no_memory, self.held_in, [*left, *right])
            both = [np.broadcast_to(steps.value(value, left[0].shape), left[0].shape) for value in combination.values]
            state = [np.concatenate([b, s[..., 2 * half :]], -1) for b, s in zip(both, state, strict=True)]
        return state

    def _converted(self, value: Array, expr: Call) -> Array:
        target = self.held_in(expr.dtype)
        if value.dtype.kind == "f" and target.kind in "iu":
            value = np.trunc(np.nan_to_num(value, posinf=0, neginf=0)).astype(np.int64)
        return value if value.dtype == target else value.astype(target)


def _whole_quotient(a: Array, b: Array) -> Array:
    """Of integers, rounded towards zero; where the divisor is 0, so is the result."""
    divisor = np.where(b == 0, 1, b)
    quotient = a // divisor
    short = (quotient < 0) & (quotient * divisor != a)
    return np.where(b == 0, 0, quotient + short)


def _no_memory(tensor: int) -> Array:
    raise ValueError("a combination reads no tensor")
