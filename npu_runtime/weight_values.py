"""What weights must not hold: NaN, which spreads to all results of a model. Infinities are noted: masks hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import WeightError

__all__ = ["check_values"]

_PIECE = 1 << 18  # elements looked at in one step, so that they stay in the cache
# Bits of infinity in each floating-point type.
_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}


def check_values(name: str, array: NDArray[Any]) -> str:
    """A note on the infinities in a tensor; empty where it has none.

    Args:
        name: Name of the tensor, for messages.
        array: The tensor.

    Raises:
        WeightError: It holds NaN.
    """
    infinity = _INFINITY.get(array.dtype.name)
    if infinity is None or _largest(array) < infinity:
        return ""
    is_nan = np.isnan(array)
    if is_nan.any():
        place = tuple(int(index) for index in np.unravel_index(int(is_nan.argmax()), array.shape))
        raise WeightError(
            f"'{name}': {int(is_nan.sum())} of {array.size} values are NaN, the first at {place}; expected numbers: "
            "the file is damaged, or the training diverged"
        )
    return f"'{name}': {int(np.isinf(array).sum())} of {array.size} values are infinite"


def _largest(array: NDArray[Any]) -> int:
    """The largest bit pattern in an array, signs put away: infinities are above all numbers, and NaN above them."""
    flat = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    mask = flat.dtype.type((1 << (8 * array.dtype.itemsize - 1)) - 1)
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    return max((int((piece & mask).max()) for piece in pieces), default=0)
