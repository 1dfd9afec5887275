"""Ops that make a tensor out of none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from npu_compiler.dtypes import BOOL, FLOAT32, INT64, DType, dtype
from npu_compiler.ops.registry import op
from npu_compiler.tensor.symbolic import Number, OpRefusal, Tensor, Trace, apply, arange, full, where


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


@op("aten.full.default", fills=("fill_value",))
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


@op("aten.full_like.default", reads_first=False, fills=("fill_value",))
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


@op("aten.new_full.default", reads_first=False, fills=("fill_value",))
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


@op("aten.scalar_tensor.default", fills=("s",))
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
    numbers = (start, end, step)
    kind = _kind(dtype, *numbers) if dtype is not None or any(isinstance(n, float) for n in numbers) else INT64
    if kind == INT64:
        start, end, step = (int(n) for n in numbers)  # as PyTorch does, before it counts them
    if step == 0:
        raise OpRefusal("given step=0, expected another number")
    length = max(0, int(-((start - end) // step)))
    if not kind.is_float:
        start, step = int(start), int(step)
    steps = arange(trace, length).cast(kind)
    return steps * step + start if (step, start) != (1, 0) else steps


@op("aten.eye.default", "aten.eye.m")
def eye(
    trace: Trace, n: int, m: int | None = None, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    """A matrix [n, m] with ones on the diagonal and zeros beside it."""
    same = apply("eq", arange(trace, n).reshape((n, 1)), arange(trace, n if m is None else m))
    return same.cast(_kind(dtype, 0.0))


@op("aten.linspace.default")
def linspace(
    trace: Trace, start: Number, end: Number, steps: int, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    """`steps` numbers from `start` to `end`, the same distance apart."""
    kind = _kind(dtype, 0.0)
    if not kind.is_float:
        raise OpRefusal(f"given dtype={dtype}, expected floating point")
    return _spaced(trace, float(start), float(end), steps).cast(kind)


@op("aten.logspace.default")
def logspace(
    trace: Trace, start: Number, end: Number, steps: int, base: float = 10.0, dtype: Any = None, layout: Any = None,
    device: Any = None, pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    """`base` to the power of `steps` numbers from `start` to `end`, the same distance apart."""
    kind = _kind(dtype, 0.0)
    if not kind.is_float or base <= 0:
        raise OpRefusal(f"given dtype={dtype} and base={base}, expected floating point and a base above 0")
    return apply("pow", full(trace, (), float(base), FLOAT32), _spaced(trace, float(start), float(end), steps)).cast(
        kind
    )


def _spaced(trace: Trace, start: float, end: float, steps: int) -> Tensor:
    """Numbers from both ends towards the middle, so that either end is exact."""
    if steps < 2:
        return full(trace, (steps,), start, FLOAT32)
    step = (end - start) / (steps - 1)
    place = arange(trace, steps)
    number = place.cast(FLOAT32)
    return where(place < steps // 2, number * step + start, (number - float(steps - 1)) * step + end)


_LONG = 4  # int64, as the schemas of ATen number data types


@op("aten.tril_indices.default")
def tril_indices(
    trace: Trace, row: int, col: int, offset: int = 0, dtype: Any = _LONG, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    """The rows and the columns [2, n] of the elements on and below a diagonal of a matrix [row, col]."""
    _check_rows(row)
    return _triangle(trace, [(0, min(col, max(0, i + offset + 1))) for i in range(row)], dtype)


@op("aten.triu_indices.default")
def triu_indices(
    trace: Trace, row: int, col: int, offset: int = 0, dtype: Any = _LONG, layout: Any = None, device: Any = None,
    pin_memory: Any = None,
) -> Tensor:  # fmt: skip
    """The rows and the columns [2, n] of the elements on and above a diagonal of a matrix [row, col]."""
    _check_rows(row)
    return _triangle(trace, [(min(col, max(0, i + offset)), col) for i in range(row)], dtype)


def _check_rows(count: int) -> None:
    if count > _MOST_ROWS:
        raise OpRefusal(f"given {count} rows, expected at most {_MOST_ROWS}")


def _triangle(trace: Trace, columns: Sequence[tuple[int, int]], dtype: Any) -> Tensor:
    """Positions in row-major order, by the first column of each row and the one behind its last."""
    ends = [*accumulate(last - first for first, last in columns)]
    count = ends[-1] if ends else 0
    place = arange(trace, count)
    row, column = (full(trace, (count,), 0, INT64) for _ in range(2))
    start = 0
    for number, ((first, _), end) in enumerate(zip(columns, ends, strict=True)):
        if end > start:
            row, column = (
                where(place < start, old, new) for old, new in ((row, number), (column, place - start + first))
            )
        start = end
    both = where(apply("eq", arange(trace, 2).reshape((2, 1)), 0), row, column)
    return both.cast(_kind(None if dtype == _LONG else dtype, 0))


_MOST_ROWS = 256  # each is a choice of its own
