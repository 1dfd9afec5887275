"""Floats of four bits, and scales that are small floats themselves: what the MX formats and NVFP4 are made of.

OCP Microscaling Formats (MX) Specification 1.0: e2m1 has the numbers of `E2M1`, e8m0 is a power of two from ``2^-127``
on, whose last code is NaN. Scales stay codes of their own data types: numbers in half precision would take twice the
bytes, and those of NVFP4, e4m3 by a number for all, would need float32.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from npu_compiler.dtypes import FLOAT8_E4M3FN
from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import Array, CodedMatrix
from npu_compiler.integers import ceil_div
from npu_compiler.tensor.coded import LARGEST

__all__ = ["E2M1", "floats_of_a_byte", "out_of_tiles", "powers_of_two", "times"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

E2M1 = np.array([*_MAGNITUDES, *(-number for number in _MAGNITUDES)], np.float32)


def powers_of_two(codes: Array) -> CodedMatrix:
    """Scales as e8m0 has them.

    Args:
        codes: uint8 or float8_e8m0fnu [rows, groups].
    """
    return _of_codes(codes.view(ml_dtypes.float8_e8m0fnu), np.ones(1, np.float32))


def floats_of_a_byte(codes: Array) -> CodedMatrix:
    """Scales as e4m3 has them.

    Args:
        codes: float8_e4m3fn [rows, groups], or uint8 with the same bits.
    """
    return _of_codes(codes.view(ml_dtypes.float8_e4m3fn), np.ones(1, np.float32))


def times(name: str, scales: CodedMatrix, factor: Array | None, divides: bool = False) -> CodedMatrix:
    """Scales by a number for all.

    Args:
        name: What the file calls the number, for messages.
        scales: As `floats_of_a_byte` gives them.
        factor: float32 of one element; None for 1.
        divides: Whether it divides the scales.

    Raises:
        ExtractionError: It is no positive number, or one by which a scale would not be a finite float32.
    """
    if factor is None:
        return scales
    with np.errstate(divide="ignore"):
        number = np.float32(1) / factor.reshape(-1) if divides else factor.reshape(-1)
    largest = LARGEST[FLOAT8_E4M3FN] * number.astype(np.float64)
    if number.size != 1 or not (number[0] > 0 and largest[0] <= np.finfo(np.float32).max):
        given = factor.reshape(-1)[:4].tolist()
        raise ExtractionError(f"'{name}': given {given}, expected one number above 0; download it again")
    return replace(scales, scales=number.reshape(1, 1))


def out_of_tiles(name: str, stored: Array, rows: int, columns: int) -> Array:
    """Scales by rows, of such as were stored for tensor cores, which read them by tiles of 128 rows and 4 columns.

    Of a tile the rows 32 apart lie beside each other: 32 rows of 4 times 4 scales. Tiles at the end are filled up.

    Args:
        name: Of the tensor, for messages.
        stored: Of any shape.
        rows, columns: Of the result.

    Raises:
        ExtractionError: There are fewer or more than the tiles take.
    """
    high, wide = ceil_div(rows, 128), ceil_div(columns, 4)
    if stored.size != high * wide * 512:
        raise ExtractionError(
            f"'{name}': given {stored.size} scales, expected {high * wide * 512}: {high} x {wide} tiles of 128 x 4"
        )
    tiles = stored.reshape(high, wide, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles.reshape(high * 128, wide * 4)[:rows, :columns])


def _of_codes(codes: Array, scale: Array) -> CodedMatrix:
    """A matrix in codes of a byte with one scale for all."""
    rows, columns = codes.shape
    return CodedMatrix((rows, columns), 8, codes, columns, scale.reshape(1, 1), columns, rows=rows, may_be_zero=True)
