"""Ops that make a tensor out of none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_compiler.dtypes import BOOL, FLOAT32, INT64, DType, dtype
from npu_compiler.ops.registry import op
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, Trace, arange, full


def _kind(name: Any, *numbers: Number) -> DType:
    """The data type asked for, or the one that Python numbers imply."""
    if name is not None:
        return dtype(name)
    if any(isinstance(n, float) for n in numbers):
        return FLOAT32
    return BOOL if all(isinstance(n, bool) for n in numbers) else INT64


def _number(value: Any) -> Number:
    """A number, which JSON may have had to spell out."""
    if isinstance(value, str) and value.lower().lstrip("+-") in ("inf", "infinity", "nan"):
        return float(value)
    if not isinstance(value, bool | int | float):
        raise OpRefusal(f"given the fill value {value!r}, expected a number")
    return value


@op("aten.full.default")
def full_(
    trace: Trace, size: Sequence[int], fill_value: Any, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    """A tensor of one value."""
    value = _number(fill_value)
    return full(trace, tuple(size), value, _kind(dtype, value))


@op("aten.zeros.default")
def zeros(
    trace: Trace, size: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    """Zeros."""
    return full(trace, tuple(size), 0, _kind(dtype, 0.0))


@op("aten.ones.default")
def ones(
    trace: Trace, size: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    """Ones."""
    return full(trace, tuple(size), 1, _kind(dtype, 1.0))


@op("aten.full_like.default", reads_first=False)
def full_like(
    self: Tensor, fill_value: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    """A tensor of one value, with the shape of another."""
    value = _number(fill_value)
    return full(self.trace, self.shape, value, self.dtype if dtype is None else _kind(dtype))


@op("aten.zeros_like.default", reads_first=False)
def zeros_like(
    self: Tensor, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    """Zeros, with the shape of another tensor."""
    return full_like(self, 0, dtype)


@op("aten.ones_like.default", reads_first=False)
def ones_like(
    self: Tensor, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    """Ones, with the shape of another tensor."""
    return full_like(self, 1, dtype)


@op("aten.new_full.default", reads_first=False)
def new_full(
    self: Tensor, size: Sequence[int], fill_value: Any, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    """A tensor of one value, with the data type of another unless one is given."""
    return full(self.trace, tuple(size), _number(fill_value), self.dtype if dtype is None else _kind(dtype))


@op("aten.new_zeros.default", reads_first=False)
def new_zeros(
    self: Tensor, size: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    """Zeros, with the data type of another tensor unless one is given."""
    return new_full(self, size, 0, dtype)


@op("aten.new_ones.default", reads_first=False)
def new_ones(
    self: Tensor, size: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    """Ones, with the data type of another tensor unless one is given."""
    return new_full(self, size, 1, dtype)


@op("aten.empty.memory_format")
def empty(
    trace: Trace, size: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None, memory_format: Any = None,
) -> Tensor:  # fmt: skip
    """A tensor whose values nobody asks for: zeros."""
    return zeros(trace, size, dtype)


@op("aten.empty_like.default", reads_first=False)
def empty_like(
    self: Tensor, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:  # fmt: skip
    """A tensor whose values nobody asks for, with the shape of another: zeros."""
    return full_like(self, 0, dtype)


@op("aten.new_empty.default", reads_first=False)
def new_empty(
    self: Tensor, size: Sequence[int], dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    """A tensor whose values nobody asks for, with the data type of another unless one is given: zeros."""
    return new_full(self, size, 0, dtype)


@op("aten.scalar_tensor.default")
def scalar_tensor(
    trace: Trace, s: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> Tensor:
    """A number as a tensor without dimensions."""
    value = _number(s)
    return full(trace, (), value, FLOAT32 if dtype is None else _kind(dtype))


@op("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def arange_(
    trace: Trace, end: Number, start: Number = 0, step: Number = 1, dtype: Any = None, layout: Any = None,
    device: Any = None, pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    """``start``, ``start + step``, ... below `end`."""
    if step == 0:
        raise OpRefusal("given step=0, expected another number")
    length = max(0, int(-((start - end) // step)))
    kind = (
        _kind(dtype, start, end, step)
        if dtype is not None
        else (FLOAT32 if any(isinstance(n, float) for n in (start, end, step)) else INT64)
    )
    steps = arange(trace, length).cast(kind)
    return steps * step + start if (step, start) != (1, 0) else steps
