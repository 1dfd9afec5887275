"""GGUF's blocks of numbers as codes: of each type, how a row of blocks becomes codes, scales and biases.

The layouts are those of ggml's block types. Types of 256 numbers (K) have two levels: the scale of each group is itself
a code of a few bits, multiplied by a half-precision number of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from npu_compiler.frontend.checkpoints.form import Array, CodedMatrix
from npu_compiler.frontend.checkpoints.packing import pack
from npu_compiler.frontend.checkpoints.small_floats import E2M1, floats_of_a_byte, powers_of_two

__all__ = ["BLOCKS", "PLAIN", "BlockType"]

PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}
"""Types without blocks, by their number in the file."""

_SUPER = 256  # numbers of a block of two levels


class BlockType(NamedTuple):
    """A type of block.

    Attributes:
        name: As GGUF has it.
        size: Numbers of a block.
        nbytes: What a block takes.
        matrix: Makes a matrix of its shape and of blocks, uint8 [rows, blocks, nbytes].
    """

    name: str
    size: int
    nbytes: int
    matrix: Callable[[tuple[int, int], Array], CodedMatrix]


def _halves(blocks: Array, start: int) -> Array:
    """The half-precision number at a byte of each block, [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0]


def _nibbles(stored: Array) -> Array:
    """The low halves of bytes along the last dimension, then the high ones."""
    return np.concatenate([stored & np.uint8(15), stored >> np.uint8(4)], -1)


def _bits(stored: Array, places: range, width: int) -> Array:
    """Bits of bytes along the last dimension: those at the first place of each byte, then those at the next one..."""
    mask = np.uint8((1 << width) - 1)
    return np.concatenate([(stored >> np.uint8(place)) & mask for place in places], -1)


def _made(
    shape: tuple[int, int],
    bits: int,
    numbers: Array,
    scales: Array | CodedMatrix,
    group: int,
    zero: int = 0,
    biases: Array | CodedMatrix | None = None,
) -> CodedMatrix:
    codes = numbers.reshape(shape)
    packed = codes if codes.dtype == np.int8 else pack(codes, bits)
    return CodedMatrix(shape, bits, packed, shape[1], scales, group, zero=zero, biases=biases, may_be_zero=True)


def _q4_0(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    return _made(shape, 4, _nibbles(blocks[..., 2:]), _halves(blocks, 0), 32, 8)


def _q4_1(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    return _made(shape, 4, _nibbles(blocks[..., 4:]), _halves(blocks, 0), 32, biases=_halves(blocks, 2))


def _fifth_bits(stored: Array) -> Array:
    """The bits of four bytes, as what they add to numbers of four bits."""
    return np.unpackbits(stored, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    numbers = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _made(shape, 5, numbers, _halves(blocks, 0), 32, 16)


def _q5_1(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    numbers = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _made(shape, 5, numbers, _halves(blocks, 0), 32, biases=_halves(blocks, 2))


def _q8_0(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    return _made(shape, 8, np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _halves(blocks, 0), 32)


def _level(shape: tuple[int, int], bits: int, numbers: Array, outer: Array, zero: int = 0) -> CodedMatrix:
    """The scales, or the biases, of groups: codes [rows, blocks, groups] times a number of each block."""
    groups = numbers.shape[-1]
    return _made((shape[0], shape[1] * groups // _SUPER), bits, numbers, outer, groups, zero)


def _six_bits(stored: Array) -> tuple[Array, Array]:
    """Eight scales and eight minima of twelve bytes."""
    low, high, rest = stored[..., :4], stored[..., 4:8], stored[..., 8:]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], -1)
    return scales, np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], -1)


def _with_minima(shape: tuple[int, int], bits: int, numbers: Array, blocks: Array) -> CodedMatrix:
    scales, minima = _six_bits(blocks[..., 4:16])
    least = _level(shape, 6, minima, -_halves(blocks, 2))
    return _made(shape, bits, numbers, _level(shape, 6, scales, _halves(blocks, 0)), 32, biases=least)


def _q4_k(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    chunks = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    return _with_minima(shape, 4, _nibbles(chunks), blocks)


def _q5_k(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    chunks = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    fifth = _bits(blocks[..., 16:48], range(8), 1).reshape(*blocks.shape[:2], 4, 64)
    return _with_minima(shape, 5, _nibbles(chunks) | (fifth << np.uint8(4)), blocks)


def _q6_k(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    lead = blocks.shape[:2]
    low = _nibbles(blocks[..., :128].reshape(*lead, 2, 64))
    high = _bits(blocks[..., 128:192].reshape(*lead, 2, 32), range(0, 8, 2), 2)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _made(shape, 6, low | (high << np.uint8(4)), _level(shape, 8, scales, _halves(blocks, 208)), 16, 32)


def _q2_k(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    numbers = _bits(blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 32), range(0, 8, 2), 2)
    scales = _level(shape, 4, blocks[..., :16] & 15, _halves(blocks, 80))
    return _made(shape, 2, numbers, scales, 16, biases=_level(shape, 4, blocks[..., :16] >> 4, -_halves(blocks, 82)))


def _q3_k(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    lead = blocks.shape[:2]
    low = _bits(blocks[..., 32:96].reshape(*lead, 2, 32), range(0, 8, 2), 2)
    third = _bits(blocks[..., :32], range(8), 1).reshape(*lead, 2, 128)
    scales = _nibbles(blocks[..., 96:104]) | (_bits(blocks[..., 104:108], range(0, 8, 2), 2) << np.uint8(4))
    return _made(shape, 3, low | (third << np.uint8(2)), _level(shape, 6, scales, _halves(blocks, 108), 32), 16, 4)


def _e2m1(shape: tuple[int, int], numbers: Array, scales: CodedMatrix, group: int) -> CodedMatrix:
    codes = pack(numbers.reshape(shape), 4)
    return CodedMatrix(shape, 4, codes, shape[1], scales, group, codebook=E2M1)


def _mxfp4(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    return _e2m1(shape, _nibbles(blocks[..., 1:]), powers_of_two(np.ascontiguousarray(blocks[..., 0])), 32)


def _nvfp4(shape: tuple[int, int], blocks: Array) -> CodedMatrix:
    numbers = _nibbles(blocks[..., 4:].reshape(*blocks.shape[:2], 4, 8))
    scales = blocks[..., :4].reshape(shape[0], -1) & np.uint8(127)  # which have no sign
    return _e2m1(shape, numbers, floats_of_a_byte(scales), 16)


BLOCKS = {
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    10: BlockType("Q2_K", _SUPER, 84, _q2_k),
    11: BlockType("Q3_K", _SUPER, 110, _q3_k),
    12: BlockType("Q4_K", _SUPER, 144, _q4_k),
    13: BlockType("Q5_K", _SUPER, 176, _q5_k),
    14: BlockType("Q6_K", _SUPER, 210, _q6_k),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
    40: BlockType("NVFP4", 64, 36, _nvfp4),
}
"""Types of blocks by their number in the file."""
