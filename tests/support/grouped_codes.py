"""The numbers of an operand in packed codes, read part by part as its form describes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import INT8, UINT8
from npu_compiler.lowering.problems.forms import GroupedCodes
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.tensor.evaluate import positions

Array = NDArray[Any]


def numbers_of(codes: GroupedCodes, position: int, memory: Callable[[int], Array]) -> Array:
    """float64 of the operand's shape, for an operand at a position of its product.

    Args:
        codes: The operand.
        position: 0 for the left matrix, 1 for the right one.
        memory: Gives the flat buffer of a tensor, by its index.
    """
    rank = len(codes.shape)
    k, row = rank - 1 - position, rank - 2 + position
    index = _packed(codes, k, codes.bits, memory(codes.tensor.index))
    if codes.codebook is not None:
        made = _read(codes.codebook, memory)[index]
    elif codes.number == UINT8:
        made = index.astype(np.float64)
    elif codes.number == INT8:
        made = index.astype(np.uint8).view(np.int8).astype(np.float64)
    else:
        made = index.astype(np.uint8).view(codes.number.numpy).astype(np.float64)
    zero: Any = codes.zero
    if codes.zeros is not None and codes.zero_bits < 8:
        zero = _spread(codes, _packed(codes.zeros, k, codes.zero_bits, memory(codes.zeros.tensor.index)), k, row)
    elif codes.zeros is not None:
        zero = _spread(codes, _read(codes.zeros, memory), k, row)
    made = (made - zero) * _spread(codes, _read(codes.scale, memory), k, row)
    if codes.bias is not None:
        made = made + _spread(codes, _read(codes.bias, memory), k, row)
    return np.asarray(made)


def _read(operand: Operand, memory: Callable[[int], Array]) -> Array:
    made: Array = memory(operand.tensor.index)[positions(operand.view)].astype(np.float64)
    return made


def _packed(operand: Operand, k: int, bits: int, flat: Array) -> Array:
    """Codes packed along k, whose other strides count bytes."""
    strides = tuple(0 if dim == k else stride for dim, stride in enumerate(operand.strides))
    first = positions(type(operand.view)(operand.shape, strides, operand.offset))
    bit = np.arange(operand.shape[k]).reshape([-1 if dim == k else 1 for dim in range(len(strides))]) * bits
    if operand.strides[k] == 0:
        bit = bit * 0
    first = first + bit // 8
    behind = np.where(bit % 8 + bits > 8, first + 1, first)
    raw = flat.view(np.uint8) if flat.dtype.itemsize == 1 else flat.astype(np.uint8)
    word = raw[first].astype(np.int64) | raw[behind].astype(np.int64) << 8
    return (word >> (bit % 8)) & ((1 << bits) - 1)


def _spread(codes: GroupedCodes, part: Array, k: int, row: int) -> Array:
    """What is the same for a group, at each place."""
    part = np.take(part, np.arange(codes.shape[k]) // codes.group, k)
    made: Array = np.take(part, np.arange(codes.shape[row]) // codes.rows, row)
    return made
