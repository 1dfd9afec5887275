"""Evaluates scalar expressions in float64: what a kernel computes, without a kernel and without its rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from npu_compiler.dtypes import FLOAT32, DType, dtype
from npu_compiler.ops import definition
from npu_compiler.tensor import evaluate as in_registers
from npu_compiler.tensor.evaluate import IndexFault, positions, read_view
from npu_compiler.tensor.expr import Expr
from npu_compiler.tensor.layout import dense
from npu_compiler.tensor.symbolic import Tensor, Trace
from npu_compiler.tensor.trace import Anchor, Map

__all__ = ["IndexFault", "apply_definition", "evaluate", "positions", "read_view"]

Array = NDArray[Any]


def _exact(kind: DType) -> np.dtype[Any]:
    return np.dtype(np.float64) if kind.is_float else np.dtype(kind.numpy)


def evaluate(expr: Expr, shape: tuple[int, ...], memory: Callable[[int], Array]) -> Array:
    """The value of `expr` at each position: floating point is float64, other types are as they are.

    Raises:
        IndexFault: An index lies beyond its tensor.
    """
    return in_registers.evaluate(expr, shape, memory, _exact)


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
