"""Floats of four bits, and scales that are small floats themselves: what the MX formats and NVFP4 are made of.

OCP Microscaling Formats (MX) Specification 1.0: e2m1 has the numbers of `E2M1`, e8m0 is a power of two from ``2^-127``
on, whose last code is NaN. Scales stay codes of their own data types: numbers in half precision would take twice the
bytes, and those of NVFP4, e4m3 by a number for all, would need float32.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import Array, CodedMatrix

__all__ = ["E2M1", "of_codes", "powers_of_two", "scales_over_one"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

E2M1 = np.array([*_MAGNITUDES, *(-number for number in _MAGNITUDES)], np.float32)


def powers_of_two(codes: Array) -> CodedMatrix:
    """Scales as e8m0 has them.

    Args:
        codes: uint8 or float8_e8m0fnu [rows, groups].
    """
    return of_codes(codes.view(ml_dtypes.float8_e8m0fnu), np.ones((1, 1), np.float32))


def scales_over_one(name: str, scales: Array, divisor: Array | None = None) -> CodedMatrix:
    """Scales in 8-bit floats, all divided by one number.

    Args:
        name: Of the divisor, for messages.
        scales: float8_e4m3fn [rows, groups], or uint8 with the same bits.
        divisor: float32 of one element; None for 1.

    Raises:
        ExtractionError: The divisor is no positive number.
    """
    number = np.ones(1, np.float32) if divisor is None else divisor.reshape(-1)
    if number.size != 1 or not np.isfinite(number[0]) or number[0] <= 0:
        raise ExtractionError(f"'{name}': given {number[:4].tolist()}, expected one number above 0; download it again")
    return of_codes(scales.view(ml_dtypes.float8_e4m3fn), (1 / number).reshape(1, 1))


def of_codes(codes: Array, scale: Array) -> CodedMatrix:
    """A matrix in codes of a byte with one scale for all."""
    rows, columns = codes.shape
    return CodedMatrix((rows, columns), 8, codes, columns, scale, columns, rows=rows, may_be_zero=True)
