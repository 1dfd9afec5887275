"""Matrices in codes of a few bits, packed along their rows: the one form that quantised checkpoints are brought to.

The codes of a row are a stream of bits, the lowest bits of a byte first. Whatever a checkpoint's own order was, its
importer (`frontend.checkpoints`) has put it into this one.
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_compiler.dtypes import FLOAT32, INT32, UINT8
from npu_compiler.dtypes import dtype as data_type
from npu_compiler.integers import ceil_div
from npu_compiler.ops.registry import op
from npu_compiler.ops.rows import Passage, RowCall
from npu_compiler.ops.traits import Term, Work
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, apply, arange

__all__ = ["dequantize", "group_of", "picked"]

_SHIFT = 32  # of a quotient by a product: exact for numbers whose product with the divisor is below two to this power


def _rows_of_codes(call: RowCall) -> Passage | None:
    """Rows of codes, with their scales, where each row has its own."""
    if call.dim >= call.rank - 1 or call.node.attrs.get("rows") != 1:
        return None
    parts = ("codes", "scales", "zeros", "biases")
    return Passage({part: call.dim for part in parts if part in call.node.inputs})


@op(
    "npu_codes.dequantize.default",
    work=Work.ELEMENTWISE,
    rows=_rows_of_codes,
    makes_numbers=True,
    term=Term("coded", ("codes", "scales", "zeros", "biases", "codebook")),
)
def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    biases: Tensor | None,
    codebook: Tensor | None,
    bits: int,
    columns: int,
    group: int,
    rows: int,
    zero: int,
    dtype: object,
) -> Tensor:
    """``(number - zero) * scale + bias``, of codes of `bits` in groups along rows of `columns`.

    Args:
        codes: [..., R, ceil(columns * bits / 8)] of uint8, packed; or [..., R, columns] of int8 or an 8-bit float.
        scales: [..., ceil(R / `rows`), ceil(columns / `group`)], floating point.
        zeros: Of the shape of `scales`, packed along the last dimension as codes are; None for `zero`.
        biases: Of the shape of `scales`; None for 0.
        codebook: [at most two to the power of `bits`]: the number that each code stands for; None for the code itself.
        bits: 2 to 8.
        columns: Numbers of a row.
        group: How many neighbours of a row share a scale.
        rows: How many neighbouring rows share scales.
        zero: Subtracted from the number of a code.
        dtype: Of the result; it is computed in float32.
    """
    _check(codes, scales, bits, columns, group, rows)
    height, groups = codes.shape[-2] if len(codes.shape) > 1 else 1, ceil_div(columns, group)
    number = _numbers(codes, bits, None if bits == 8 else {-1: arange(codes.trace, columns)})
    if codebook is not None:
        number = codebook.gather(0, number).cast(FLOAT32)
    number = number.cast(FLOAT32)
    of_column = group_of(arange(codes.trace, columns), group)
    places = {-1: of_column} if groups > 1 else {}
    if rows > 1 and len(codes.shape) > 1:
        places[-2] = group_of(arange(codes.trace, height), rows).reshape((height, 1))
    if zeros is not None:
        number = number - _numbers(zeros, bits, places if bits == 8 else {-1: of_column, **places}).cast(FLOAT32)
    elif zero:
        number = number - float(zero)
    number = number * picked(scales, places).cast(FLOAT32)
    if biases is not None:
        number = number + picked(biases, places).cast(FLOAT32)
    return number.cast(data_type(dtype))


def _check(codes: Tensor, scales: Tensor, bits: int, columns: int, group: int, rows: int) -> None:
    if not 2 <= bits <= 8 or group < 1 or rows < 1 or columns < 1:
        raise OpRefusal(f"given bits={bits}, group={group} and rows={rows}, expected 2 to 8 bits and sizes from 1 on")
    packed = codes.dtype == UINT8
    if not packed and (codes.dtype.size != 1 or bits != 8):
        raise OpRefusal(f"given {bits} bits in {codes.dtype}, expected uint8, or 8 bits in int8 or an 8-bit float")
    width = ceil_div(columns * bits, 8)
    *outer, height, row = codes.shape if len(codes.shape) > 1 else (1, *codes.shape)
    leading = (*outer, ceil_div(height, rows)) if len(codes.shape) > 1 else ()
    expected = (*leading, ceil_div(columns, group))
    if row != width or scales.shape != expected:
        raise OpRefusal(
            f"given codes {list(codes.shape)} and scales {list(scales.shape)}, expected rows of {width} bytes for "
            f"{columns} numbers of {bits} bits, and scales {list(expected)}"
        )
    if not scales.dtype.is_float or columns * max(8, group) >= 1 << _SHIFT:
        raise OpRefusal(f"given scales of {scales.dtype} for {columns} columns, expected floating point and fewer")


def _numbers(codes: Tensor, bits: int, places: Mapping[int, Tensor] | None) -> Tensor:
    """The codes at positions of dimensions, counted from the end, as integers from 0 on where they are packed.

    Args:
        codes: As in `dequantize`.
        bits: Of a code.
        places: By dimension; along the last one codes are counted, not bytes. None for all codes, each of a byte.
    """
    if bits == 8:
        return picked(codes, places or {})
    assert places is not None
    first = places[-1] * bits
    byte = apply("shr", first, 3)
    word = picked(codes, {**places, -1: byte}).cast(INT32)
    if 8 % bits:  # some lie in two bytes
        next_byte = apply("min", byte + 1, codes.shape[-1] - 1)
        word = apply("or", word, apply("shl", picked(codes, {**places, -1: next_byte}).cast(INT32), 8))
    return apply("and", apply("shr", word, apply("and", first, 7).cast(INT32)), (1 << bits) - 1)


def picked(tensor: Tensor, places: Mapping[int, Tensor]) -> Tensor:
    """The elements at positions of some dimensions, which are counted from the end."""
    rank = len(tensor.shape)
    return tensor.at({rank + dim: place for dim, place in places.items() if tensor.shape[dim] > 1})


def group_of(position: Tensor, size: int) -> Tensor:
    """Which group of `size` neighbours each position from 0 on lies in."""
    if size & (size - 1):
        return apply("shr", position * ceil_div(1 << _SHIFT, size), _SHIFT)
    return apply("shr", position, size.bit_length() - 1)
