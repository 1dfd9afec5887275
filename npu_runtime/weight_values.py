"""What weights must not hold: NaN, which spreads to all results of a model. Infinities are noted: masks hold them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import dtype
from npu_compiler.errors import WeightError

__all__ = ["STEP_BYTES", "all_finite", "check_values"]

# Looked at in one step: few enough that the second look finds them in a cache, and so many that the interpreter's lock,
# which threads hand over after each look, does not matter.
STEP_BYTES = 4 << 20


def check_values(name: str, array: NDArray[Any]) -> str:
    """A note on the infinities in a tensor; empty where it has none.

    Args:
        name: Name of the tensor, for messages.
        array: The tensor.

    Raises:
        WeightError: It holds NaN.
    """
    if all_finite(array):
        return ""
    with np.errstate(invalid="ignore"):  # a signalling NaN is found like any other
        is_nan, is_infinite = np.isnan(array), np.isinf(array)
    if is_nan.any():
        place = tuple(int(index) for index in np.unravel_index(int(is_nan.argmax()), array.shape))
        raise WeightError(
            f"'{name}': {int(is_nan.sum())} of {array.size} values are NaN, the first at {place}; expected numbers: "
            "the file is damaged, or the training diverged"
        )
    return f"'{name}': {int(is_infinite.sum())} of {array.size} values are infinite"


@cache
def _infinity(kind: np.dtype[Any]) -> int | None:
    """The least bits, without a sign, of a data type that are no finite number; None where it is not floating point."""
    if not dtype(kind).is_float:
        return None
    with np.errstate(invalid="ignore"):
        return int(np.array(np.inf, np.float32).astype(kind).view(f"u{kind.itemsize}"))  # NaN where it has no infinity


def all_finite(array: NDArray[Any]) -> bool:
    """Whether a tensor holds neither NaN nor infinities; integers never do.

    In the order of bit patterns, infinity is above all numbers of its sign, and NaN above it. So the largest pattern
    tells: as signed integers that of the values without a sign, as unsigned ones that of those with a sign. Neither
    look makes an array, and both together take less time than one that puts the signs away. A type without signs, whose
    infinity has the highest bit, needs the second look alone.
    """
    infinity, size = _infinity(array.dtype), array.dtype.itemsize
    if infinity is None:
        return True
    signed = np.ascontiguousarray(array).reshape(-1).view(f"i{size}")
    sign = 1 << (8 * size - 1)
    unsigned, negative_infinity = signed.view(f"u{size}"), infinity | sign
    step = STEP_BYTES // size
    return all(
        int(signed[start : start + step].max()) < infinity
        and int(unsigned[start : start + step].max()) < negative_infinity
        for start in range(0, signed.size, step)
    )
