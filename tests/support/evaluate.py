"""Evaluates scalar expressions by numpy: what a kernel computes, without a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from npu_compiler.dtypes import FLOAT32, dtype
from npu_compiler.ops import definition
from npu_compiler.tensor.expr import (
    FUNCTIONS,
    Call,
    Checked,
    Combination,
    Const,
    Expr,
    Iota,
    Load,
    Reduce,
    Slot,
)
from npu_compiler.tensor.layout import dense
from npu_compiler.tensor.symbolic import Tensor, Trace
from npu_compiler.tensor.trace import Anchor, Map
from npu_compiler.tensor.view import View

__all__ = ["IndexFault", "apply_definition", "evaluate", "positions", "read_view"]

Array = NDArray[Any]
Memory = Callable[[int], Array]


class IndexFault(Exception):
    """An index beyond its tensor: the number of its check, the element of the index tensor, and the value."""

    def __init__(self, check: int, element: int, value: int) -> None:
        super().__init__(check, element, value)
        self.check, self.element, self.value = check, element, value


def positions(view: View) -> Array:
    """For each element of a view where it lies in its buffer; int64 of `view.shape`."""
    result = np.full(view.shape, view.offset, np.int64)
    for dim, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        result += (np.arange(size) * stride).reshape((-1, *(1,) * (len(view.shape) - dim - 1)))
    return result


def read_view(buffer: Array, where: Array) -> Array:
    """Elements of a flat buffer; outside of it lies NaN, and a number that no test expects for other types."""
    outside = (where < 0) | (where >= len(buffer))
    if not len(buffer):
        return np.full(where.shape, np.nan)
    values = buffer[np.where(outside, 0, where)]
    if not outside.any():
        return values
    return np.where(outside, np.nan if values.dtype.kind == "f" else values.dtype.type(77), values)


def evaluate(expr: Expr, shape: tuple[int, ...], memory: Memory) -> Array:
    """The value of `expr` at each position.

    Floating point is float64; other types are as they are.

    Args:
        expr: An expression over `shape`.
        shape: The iteration space. What `expr` reduces, it reduces over the last dimension.
        memory: Gives the flat buffer of each tensor of the trace.

    Raises:
        IndexFault: An index lies beyond its tensor.
    """
    return np.broadcast_to(_Evaluation(memory).value(expr, shape), shape)


class _Evaluation:
    def __init__(self, memory: Memory, state: Sequence[Array] = ()) -> None:
        self.memory, self.state = memory, state
        self._known: dict[tuple[Expr, tuple[int, ...]], Array] = {}

    def value(self, expr: Expr, shape: tuple[int, ...]) -> Array:
        key = (expr, shape)
        if key not in self._known:
            with np.errstate(all="ignore"):
                self._known[key] = self._compute(expr, shape)
        return self._known[key]

    def _compute(self, expr: Expr, shape: tuple[int, ...]) -> Array:
        if isinstance(expr, Const):
            return np.asarray(expr.value, _numpy(expr.dtype))
        if isinstance(expr, Iota):
            return positions(expr.view.expand(shape)).astype(_numpy(expr.dtype))
        if isinstance(expr, Load):
            where = positions(expr.ref.view.expand(shape))
            if expr.index is not None:
                where = where + self.value(expr.index, shape).astype(np.int64) * expr.index_stride
            return read_view(self.memory(expr.ref.tensor), where)
        if isinstance(expr, Reduce):
            inner = (*shape[:-1], expr.extent)
            state = [np.broadcast_to(self.value(arg, inner), inner) for arg in expr.args]
            return _reduced(expr.combination, state)[expr.item].astype(_numpy(expr.dtype))
        if isinstance(expr, Slot):
            return self.state[expr.number]
        if isinstance(expr, Checked):
            return self._checked(expr, shape)
        args = [self.value(arg, shape) for arg in expr.args]
        result = args[0] if expr.fn == "cast" else FUNCTIONS[expr.fn].numpy(*args)
        return _converted(np.asarray(result), expr)

    def _checked(self, expr: Checked, shape: tuple[int, ...]) -> Array:
        """Both sides of a `where` are computed here, also where there is no such element of the index tensor."""
        index = np.broadcast_to(self.value(expr.index, shape), shape)
        element = np.broadcast_to(self.value(expr.element, shape), shape)
        inside = (index >= 0) & (index < expr.extent)
        wrong = ~inside & (element >= 0) & (element < expr.elements)
        if wrong.any():
            raise IndexFault(expr.check, int(element[wrong][0]), int(index[wrong][0]))
        return np.where(inside, index, expr.otherwise)


def _reduced(combination: Combination, state: list[Array]) -> list[Array]:
    """The state of each row [..., 1] by the numbers of its elements [..., n]: halves are combined until one is left."""
    if not state[0].shape[-1]:
        alone = zip(state, combination.identity, strict=True)
        return [np.full((*numbers.shape[:-1], 1), const.value, numbers.dtype) for numbers, const in alone]
    while state[0].shape[-1] > 1:
        half = state[0].shape[-1] // 2
        left, right = ([numbers[..., start : start + half] for numbers in state] for start in (0, half))
        steps = _Evaluation(_no_memory, [*left, *right])
        both = [np.broadcast_to(steps.value(value, left[0].shape), left[0].shape) for value in combination.values]
        state = [np.concatenate([b, s[..., 2 * half :]], -1) for b, s in zip(both, state, strict=True)]
    return state


def _no_memory(tensor: int) -> Array:
    raise AssertionError("a combination reads no tensor")


def _converted(value: Array, expr: Call) -> Array:
    target = _numpy(expr.dtype)
    if value.dtype.kind == "f" and target.kind in "iu":
        value = np.trunc(np.nan_to_num(value, posinf=0, neginf=0)).astype(np.int64)
    return value if value.dtype == target else value.astype(target)


def _numpy(kind: Any) -> np.dtype[Any]:
    return np.dtype(np.float64) if kind.is_float else np.dtype(kind.numpy)


class _Dense:
    """Every tensor is row-major."""

    def layout(self, shape: tuple[int, ...], role: str) -> Any:
        return dense(shape)


def apply_definition(op: str, *args: Any, **kwargs: Any) -> list[Array]:
    """Calls the definition of an op without anchors on torch tensors, and evaluates what it gives.

    Args:
        op: ATen name.
        args, kwargs: The op's arguments by its parameters; tensors, lists of tensors, or attributes.
    """
    entry = definition(op)
    assert entry is not None
    trace = Trace(_Dense())
    buffers: dict[int, Array] = {}

    def symbol(value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            return [symbol(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        kind = FLOAT32 if value.dtype == torch.float64 else dtype(str(value.dtype))
        result = trace.add("operand", tuple(value.shape), kind, "plain")
        buffers[len(trace.tensors) - 1] = value.contiguous().numpy().reshape(-1)
        return result

    given = {key: symbol(value) for key, value in kwargs.items()}
    result = entry.function(*([trace] if entry.creates else []), *(symbol(arg) for arg in args), **given)
    results: Sequence[Tensor] = result if isinstance(result, tuple) else (result,)
    references = [tensor.realize().ref for tensor in results]

    def memory(index: int) -> Array:
        if index not in buffers:
            source = trace.tensors[index].source
            assert isinstance(source, Map), f"{type(source).__name__} has no expression"
            shape = trace.tensors[index].shape
            buffers[index] = evaluate(source.expr, shape or (1,), memory).reshape(prod(shape))
        return buffers[index]

    assert not any(isinstance(tensor.source, Anchor) for tensor in trace.tensors)
    return [read_view(memory(ref.tensor), positions(ref.view)) for ref in references if ref is not None]
