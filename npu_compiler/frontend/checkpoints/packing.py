"""Streams of bits: integers of 2 to 8 bits, one after another, from the lowest bit of the first byte on."""

from __future__ import annotations

import numpy as np

from npu_compiler.frontend.checkpoints.form import Array
from npu_compiler.integers import ceil_div

__all__ = ["pack", "unpack", "words"]


def unpack(stream: Array, bits: int, count: int) -> Array:
    """The first `count` integers of each row.

    Args:
        stream: uint8 [..., bytes].
        bits: Of an integer.
        count: At most as many as the bytes hold.

    Returns:
        uint8 [..., count].
    """
    if bits == 8:
        return stream[..., :count]
    mask = np.uint8((1 << bits) - 1)
    if 8 % bits == 0:
        parts = [(stream >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
        return np.stack(parts, -1).reshape(*stream.shape[:-1], -1)[..., :count]
    first = np.arange(count) * bits
    wide = np.concatenate([stream, np.zeros((*stream.shape[:-1], 1), np.uint8)], -1).astype(np.uint16)
    word = wide[..., first >> 3] | (wide[..., (first >> 3) + 1] << np.uint16(8))
    return ((word >> (first & 7).astype(np.uint16)) & mask).astype(np.uint8)


def pack(numbers: Array, bits: int) -> Array:
    """The inverse of `unpack`: uint8 [..., count] to [..., ceil(count * bits / 8)], filled up with zeros."""
    if bits == 8:
        return np.ascontiguousarray(numbers, np.uint8)
    *outer, count = numbers.shape
    width = ceil_div(count * bits, 8)
    if 8 % bits == 0:
        each = 8 // bits
        padded = numbers
        if count % each:
            padded = np.zeros((*outer, width * each), np.uint8)
            padded[..., :count] = numbers
        parts = padded.reshape(*outer, width, each)
        stream = parts[..., 0].astype(np.uint8)
        for place in range(1, each):
            stream |= parts[..., place] << np.uint8(place * bits)
        return stream
    flags = np.unpackbits(numbers.astype(np.uint8)[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(flags.reshape(*outer, count * bits), axis=-1, bitorder="little")


def words(array: Array) -> Array:
    """The bytes of integers of 32 bits along the last dimension, the lowest first."""
    return np.ascontiguousarray(array).astype("<u4" if array.dtype.kind == "u" else "<i4", copy=False).view(np.uint8)
