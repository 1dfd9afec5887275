"""Rounding of weights to codes: to the nearest, in the range of each group that makes the least error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from npu_compiler.frontend.checkpoints.form import Array

__all__ = ["NF4", "Rounded", "round_to_codebook", "round_to_floats", "round_to_integers"]

# The numbers of NormalFloat, evenly likely under a normal distribution: Dettmers et al., "QLoRA" (2023), appendix E.
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)

_RANGES = tuple(1 - 0.03 * step for step in range(11))  # parts of the whole range that are tried
_LEAST = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126}  # that are not subnormal
_LARGEST = 448.0  # of float8_e4m3fn
_CHUNK = 1 << 22  # elements that are rounded at a time


class Rounded(NamedTuple):
    """A matrix in codes.

    Attributes:
        codes: [rows, columns]: uint8 from 0 on, or int8 where it is symmetric and of eight bits, or 8-bit floats.
        scales: [rows, groups].
        zeros: uint8 [rows, groups]; None where the zero is in the middle.
        error: The squared error, summed.
        bits: Of a code.
    """

    codes: Array
    scales: Array
    zeros: Array | None
    error: float
    bits: int = 8

    def numbers(self, codebook: Array | None = None) -> Array:
        """What the codes stand for, float32 [rows, columns].

        Args:
            codebook: See `round_to_codebook`.
        """
        rows, columns = self.codes.shape
        made = codebook[self.codes] if codebook is not None else self.codes.astype(np.float32)
        made = made.reshape(rows, self.scales.shape[1], -1)
        if self.zeros is not None:
            made = made - self.zeros[..., None]
        elif self.codes.dtype == np.uint8 and codebook is None:
            made = made - np.float32(1 << (self.bits - 1))
        result: Array = (made * self.scales.astype(np.float32)[..., None]).reshape(rows, columns)
        return result


def _chunks(weight: Array, group: int) -> Iterator[tuple[slice, Array]]:
    """Some rows at a time, as [rows, groups, group] in float32."""
    rows, columns = weight.shape
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        yield part, weight[part].astype(np.float32).reshape(-1, columns // group, group)


def _usable(scales: Array, kind: np.dtype) -> Array:
    """Scales as they are stored; 1 for a group of zeros, and never too small for the data type."""
    stored = np.where(scales > 0, np.maximum(scales, np.float32(_LEAST[kind.name])), np.float32(1))
    made: Array = stored.astype(kind)
    return made


def round_to_integers(
    weight: Array,
    bits: int,
    group: int,
    kind: np.dtype,
    symmetric: bool,
    importance: Array | None = None,
    fits: bool = True,
) -> Rounded:
    """Rounds a matrix to integers.

    Args:
        weight: [rows, columns], floating point, finite.
        bits: 2 to 8.
        group: Columns that share a scale, a divisor of them.
        kind: Half precision of the scales.
        symmetric: Whether zero is the middle of the range; else each group has a zero point of its own.
        importance: [columns]: how much a squared error counts when the range of a group is chosen; None for all alike.
        fits: Whether parts of the range are tried, or the whole is taken.
    """
    rows, columns = weight.shape
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    codes = np.empty((rows, columns), np.uint8)
    scales = np.empty((rows, columns // group), kind)
    zeros = np.empty(scales.shape, np.uint8)
    total = 0.0
    counts = None if importance is None else importance.astype(np.float32).reshape(1, -1, group)
    for part, groups in _chunks(weight, group):
        least = np.full(groups.shape[:2], np.inf, np.float32)
        low, high = groups.min(-1).clip(max=0), groups.max(-1).clip(min=0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        best = np.full(low.shape, np.inf, np.float32)
        for size in _RANGES if fits else _RANGES[:1]:
            scale = _usable((high - low) * np.float32(size / (top - 1 if symmetric else top)), kind)
            wide = scale.astype(np.float32)[..., None]
            zero = np.full(low.shape, middle, np.float32)
            if not symmetric:
                zero = np.rint(-low * np.float32(size) / wide[..., 0]).clip(0, top)
            made = (np.rint(groups / wide) + zero[..., None]).clip(0, top)
            squares = np.square((made - zero[..., None]) * wide - groups)
            error = squares.sum(-1)
            counted = error if counts is None else (squares * counts).sum(-1)
            better = counted < least
            least, best = np.where(better, counted, least), np.where(better, error, best)
            scales[part] = np.where(better, scale, scales[part])
            zeros[part] = np.where(better, zero, zeros[part])
            own = codes[part].reshape(groups.shape)
            codes[part] = np.where(better[..., None], made, own).astype(np.uint8).reshape(-1, columns)
        total += float(best.sum(dtype=np.float64))
    if not symmetric:
        return Rounded(codes, scales, zeros, total, bits)
    return Rounded((codes ^ np.uint8(128)).view(np.int8) if bits == 8 else codes, scales, None, total, bits)


def round_to_floats(weight: Array, kind: np.dtype) -> Rounded:
    """Rounds a matrix to 8-bit floats (e4m3); the scale of a row takes its largest number to their largest."""
    rows, columns = weight.shape
    codes, scales = np.empty((rows, columns), ml_dtypes.float8_e4m3fn), np.empty((rows, 1), kind)
    total = 0.0
    for part, groups in _chunks(weight, columns):
        scales[part] = _usable(np.abs(groups).max(-1) / np.float32(_LARGEST), kind)
        wide = scales[part].astype(np.float32)
        numbers = groups[:, 0] / wide
        codes[part] = numbers.clip(-_LARGEST, _LARGEST).astype(ml_dtypes.float8_e4m3fn)
        total += float(np.square(codes[part].astype(np.float32) * wide - groups[:, 0]).sum(dtype=np.float64))
    return Rounded(codes, scales, None, total)


def round_to_codebook(weight: Array, group: int, codebook: Array) -> Rounded:
    """Rounds a matrix to the nearest of a few ascending numbers, times the largest magnitude of each group.

    The scales are float32.
    """
    rows, columns = weight.shape
    codes, scales = np.empty((rows, columns), np.uint8), np.empty((rows, columns // group), np.float32)
    between = (codebook[1:] + codebook[:-1]) / 2
    total = 0.0
    for part, groups in _chunks(weight, group):
        scales[part] = _usable(np.abs(groups).max(-1), np.dtype(np.float32))
        wide = scales[part][..., None]
        made = np.searchsorted(between, groups / wide).astype(np.uint8)
        codes[part] = made.reshape(-1, columns)
        total += float(np.square(codebook[made] * wide - groups).sum(dtype=np.float64))
    return Rounded(codes, scales, None, total)
