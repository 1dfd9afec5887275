"""The one form that all quantised weights are brought to: codes, packed along rows, and what makes numbers of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import ExtractionError
from npu_compiler.integers import ceil_div

__all__ = ["Array", "CodedMatrix"]

Array = NDArray[Any]


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix of which each number is ``(number of its code - zero) * scale + bias``.

    Attributes:
        shape: [rows, columns] of the matrix. The codes may divide its elements, in their order, into other rows.
        bits: Of a code, 2 to 8.
        codes: uint8 [R, ceil(columns * bits / 8)], each row a stream of bits from the lowest of its first byte on; or
            int8 or an 8-bit float, [R, columns].
        columns: How many codes a row has.
        scales: [ceil(R / rows), ceil(columns / group)], floating point or made of codes themselves.
        group: How many neighbours of a row share a scale.
        rows: How many neighbouring rows share scales.
        zero: Subtracted from the number of a code, where `zeros` is None.
        zeros: uint8, of each group, packed as codes are along the groups of a row.
        biases: As `scales`; None for 0.
        codebook: float32, the number of each code; None for the code itself.
        permutation: int64 [columns]: which element of an input meets each column of the matrix; None for its own.
        scales_name: What the file calls its scales, for messages.
        may_be_zero: Whether the format gives a group of zeros the scale 0.
    """

    shape: tuple[int, int]
    bits: int
    codes: Array = field(repr=False)
    columns: int
    scales: Array | CodedMatrix = field(repr=False)
    group: int
    rows: int = 1
    zero: int = 0
    zeros: Array | None = field(default=None, repr=False)
    biases: Array | CodedMatrix | None = field(default=None, repr=False)
    codebook: Array | None = field(default=None, repr=False)
    permutation: Array | None = field(default=None, repr=False)
    scales_name: str = ""
    may_be_zero: bool = False

    def check(self, name: str) -> CodedMatrix:
        """Itself, if codes, scales and sizes agree.

        Args:
            name: What the file calls the weight, for messages.

        Raises:
            ExtractionError: They do not, or a scale is no number that a weight can have.
        """
        width = ceil_div(self.columns * self.bits, 8)
        if not 2 <= self.bits <= 8 or (self.codes.dtype != np.uint8 and self.bits != 8):
            raise ExtractionError(
                f"'{name}': given {self.bits} bits in {self.codes.dtype}, expected 2 to 8, or 8 there"
            )
        height = prod(self.shape) // max(1, self.columns)
        groups = (ceil_div(height, self.rows), ceil_div(self.columns, self.group))
        self._expect(name, "codes", self.codes.shape, (height, width))
        for what, part in (("scales", self.scales), ("biases", self.biases)):
            if part is not None:
                self._expect(name, what, part.shape, groups)
        if self.zeros is not None:
            self._expect(name, "zeros", self.zeros.shape, (groups[0], ceil_div(groups[1] * self.bits, 8)))
        if isinstance(self.scales, CodedMatrix):
            self.scales.check(name)
            _check_codes_of_scales(self.scales_name or name, self.scales.codes)
        else:
            _check_scales(self.scales_name or name, self.scales, self.may_be_zero)
        if isinstance(self.biases, CodedMatrix):
            self.biases.check(name)
        elif self.biases is not None and not np.isfinite(self.biases.astype(np.float32)).all():
            raise ExtractionError(
                f"'{name}': given biases that are infinite or NaN, expected numbers; download it again"
            )
        if self.codebook is not None and self.codebook.size < 1 << self.bits:
            top = int(self.codes.max(initial=0)) if self.bits == 8 else (1 << self.bits) - 1
            if top >= self.codebook.size:
                raise ExtractionError(
                    f"'{name}': given the code {top} and a codebook of {self.codebook.size} numbers, expected codes "
                    "within it"
                )
        return self

    @staticmethod
    def _expect(name: str, what: str, given: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if tuple(given) != expected:
            raise ExtractionError(f"'{name}': given {what} of shape {list(given)}, expected {list(expected)}")


def _check_scales(name: str, scales: Array, may_be_zero: bool) -> None:
    numbers = scales.astype(np.float32)
    wrong = ~np.isfinite(numbers) | ((numbers == 0) & (not may_be_zero))
    _refuse(name, wrong, lambda place: str(numbers[place]), "a number other than 0")


def _check_codes_of_scales(name: str, codes: Array) -> None:
    """Refuses scales in 8-bit floats that are NaN."""
    if codes.dtype.kind not in "iu":
        wrong, kind = np.isnan(codes.astype(np.float32)), codes.dtype.name
        _refuse(name, wrong, lambda place: f"NaN (code {int(codes[place].view(np.uint8))} of {kind})", "a number")


def _refuse(name: str, wrong: Array, told: Callable[[tuple[int, ...]], str], expected: str) -> None:
    """Refuses scales of which some are wrong, by what is told of the first."""
    if wrong.any():
        place = tuple(int(index) for index in np.unravel_index(int(wrong.argmax()), wrong.shape))
        raise ExtractionError(
            f"'{name}': given the scale {told(place)} at {[*place]}, expected {expected}; the checkpoint is damaged: "
            "download or quantise it again"
        )
