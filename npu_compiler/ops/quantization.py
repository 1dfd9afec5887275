"""Tensors stored in codes. What reads the numbers may read the codes themselves: see `lowering.dequantisation`.

PyTorch has several spellings of the same two equations, in which scales and zero points are numbers or tensors: for the
whole tensor, for each channel, each row, or each block of some dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from npu_compiler.dtypes import FLOAT32, INT32, DType
from npu_compiler.dtypes import dtype as data_type
from npu_compiler.integers import ceil_div
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.codes import group_of, picked
from npu_compiler.ops.elementwise import clamp, clamp_tensor
from npu_compiler.ops.linear import flops, product
from npu_compiler.ops.pointwise import round_
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Term, Work
from npu_compiler.tensor.rounded import rounded_code
from npu_compiler.tensor.shapes import OpRefusal, normalize_dim
from npu_compiler.tensor.symbolic import Number, Tensor, apply, arange

_LIBRARY = "quantized_decomposed"


def _is_of_outputs(node: OpNode, graph: IRGraph) -> bool:
    """Whether each position along the first dimension has a scale."""
    return node.attrs.get("axis") == 0


@op(
    f"{_LIBRARY}.dequantize_per_channel.default",
    work=Work.ELEMENTWISE,
    makes_numbers=True,
    exact=("scales",),
    term=Term("numbers_by_output", ("input", "scales", "zero_points"), holds=_is_of_outputs),
)
def dequantize_per_channel(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: object,
    out_dtype: object = None,
) -> Tensor:
    """``(input - zero_points) * scales`` for each position along `axis`; the limits were those of rounding."""
    _check_codes(input, dtype)
    channels = _channels(input, axis)
    zeros = None if zero_points is None else zero_points.reshape(channels)
    return _numbers(input, scales.reshape(channels), zeros, _made(out_dtype))


@op(
    f"{_LIBRARY}.dequantize_per_tensor.default",
    work=Work.ELEMENTWISE,
    makes_numbers=True,
    term=Term("numbers", ("input", "scale", "zero_point")),
)
def dequantize_per_tensor(
    input: Tensor,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: object,
    out_dtype: object = None,
) -> Tensor:
    """``(input - zero_point) * scale``; the limits were those of rounding."""
    _check_codes(input, dtype)
    return _numbers(input, scale, zero_point, _made(out_dtype))


@op(f"{_LIBRARY}.dequantize_per_tensor.tensor", exact=("scale",), work=Work.ELEMENTWISE, makes_numbers=True)
def dequantize_per_tensor_of_tensors(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int,
    quant_max: int,
    dtype: object,
    out_dtype: object = None,
) -> Tensor:
    """``(input - zero_point) * scale``, of tensors of one element."""
    _check_codes(input, dtype)
    return _numbers(input, _single(scale, input), _single(zero_point, input), _made(out_dtype))


@op(f"{_LIBRARY}.dequantize_per_tensor.tensor2", exact=("scale",), work=Work.ELEMENTWISE, makes_numbers=True)
def dequantize_per_tensor_within_tensors(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: Tensor,
    quant_max: Tensor,
    dtype: object,
    out_dtype: object = None,
) -> Tensor:
    """``(input - zero_point) * scale``, of tensors of one element; the limits were those of rounding."""
    return dequantize_per_tensor_of_tensors(input, scale, zero_point, 0, 0, dtype, out_dtype)


@op(f"{_LIBRARY}.dequantize_per_token.default", exact=("scales",), work=Work.ELEMENTWISE, makes_numbers=True)
def dequantize_per_token(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    quant_min: int,
    quant_max: int,
    dtype: object,
    output_dtype: object,
) -> Tensor:
    """``(input - zero_points) * scales`` for each row along the last dimension."""
    _check_codes(input, dtype)
    return _numbers(input, scales, zero_points, data_type(output_dtype))


@op(f"{_LIBRARY}.dequantize_per_channel_group.default", exact=("scales",), work=Work.ELEMENTWISE, makes_numbers=True)
def dequantize_per_channel_group(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    quant_min: int,
    quant_max: int,
    dtype: object,
    group_size: int,
    output_dtype: object,
) -> Tensor:
    """``(input - zero_points) * scales`` for each group of neighbours along the rows of a matrix."""
    _check_codes(input, dtype)
    block = [1, _group(input, group_size)]
    return _in_blocks(input, block, scales, zero_points, _numbers, data_type(output_dtype))


@op("torchao.dequantize_affine.default", exact=("scale",), work=Work.ELEMENTWISE, makes_numbers=True)
def dequantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    input_dtype: object,
    quant_min: Any = None,
    quant_max: Any = None,
    output_dtype: object = "float32",
) -> Tensor:
    """``(input - zero_point) * scale`` for each block of `block_size`."""
    _check_codes(input, input_dtype)
    return _in_blocks(input, block_size, scale, zero_point, _numbers, data_type(output_dtype))


@op(f"{_LIBRARY}.quantize_per_tensor.default", work=Work.ELEMENTWISE)
def quantize_per_tensor(
    input: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int, dtype: object
) -> Tensor:
    """``round(input / scale) + zero_point`` within the limits, as integers."""
    return _codes(input, scale, zero_point, (quant_min, quant_max), data_type(dtype))


@op(f"{_LIBRARY}.quantize_per_tensor.tensor", exact=("scale",), work=Work.ELEMENTWISE)
def quantize_per_tensor_of_tensors(
    input: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, dtype: object
) -> Tensor:
    """``round(input / scale) + zero_point`` within the limits, of tensors of one element."""
    limits = (quant_min, quant_max)
    return _codes(input, _single(scale, input), _single(zero_point, input), limits, data_type(dtype))


@op(f"{_LIBRARY}.quantize_per_tensor.tensor2", exact=("scale",), work=Work.ELEMENTWISE)
def quantize_per_tensor_within_tensors(
    input: Tensor, scale: Tensor, zero_point: Tensor, quant_min: Tensor, quant_max: Tensor, dtype: object
) -> Tensor:
    """``round(input / scale) + zero_point`` within the limits, all of them tensors of one element."""
    limits = (_single(quant_min, input), _single(quant_max, input))
    return _codes(input, _single(scale, input), _single(zero_point, input), limits, data_type(dtype))


@op(f"{_LIBRARY}.quantize_per_channel.default", exact=("scales",), work=Work.ELEMENTWISE)
def quantize_per_channel(
    input: Tensor, scales: Tensor, zero_points: Tensor, axis: int, quant_min: int, quant_max: int, dtype: object
) -> Tensor:
    """``round(input / scales) + zero_points`` for each position along `axis`, within the limits."""
    channels = _channels(input, axis)
    limits = (quant_min, quant_max)
    return _codes(input, scales.reshape(channels), zero_points.reshape(channels), limits, data_type(dtype))


@op(f"{_LIBRARY}.quantize_per_token.default", exact=("scales",), work=Work.ELEMENTWISE)
def quantize_per_token(
    input: Tensor, scales: Tensor, zero_points: Tensor, quant_min: int, quant_max: int, dtype: object
) -> Tensor:
    """``round(input / scales + zero_points)`` for each row along the last dimension, within the limits."""
    return _codes(input, scales, zero_points, (quant_min, quant_max), data_type(dtype), zero_first=True)


@op(f"{_LIBRARY}.quantize_per_channel_group.default", exact=("scales",), work=Work.ELEMENTWISE)
def quantize_per_channel_group(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    quant_min: int,
    quant_max: int,
    dtype: object,
    group_size: int = 128,
) -> Tensor:
    """``round(input / scales + zero_points)`` for each group of neighbours along the rows of a matrix."""
    block = [1, _group(input, group_size)]
    return _in_blocks(input, block, scales, zero_points, _codes, (quant_min, quant_max), data_type(dtype), True)


@op("torchao.quantize_affine.default", exact=("scale",), work=Work.ELEMENTWISE)
def quantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    output_dtype: object,
    quant_min: Any = None,
    quant_max: Any = None,
) -> Tensor:
    """``round(input / scale) + zero_point`` for each block of `block_size`, within the limits."""
    kind = data_type(output_dtype)
    if not kind.is_integer:
        raise OpRefusal(f"given output_dtype={output_dtype}, expected integers")
    bits, signed = 8 * kind.size, not kind.name.startswith("u")
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    limits = (low if quant_min is None else quant_min, high if quant_max is None else quant_max)
    return _in_blocks(input, block_size, scale, zero_point, _codes, limits, kind)


def _numbers(input: Tensor, scale: Tensor | Number, zero: Tensor | Number | None, made: DType) -> Tensor:
    numbers = input.cast(FLOAT32)
    if zero is not None:
        numbers = numbers - (zero.cast(FLOAT32) if isinstance(zero, Tensor) else zero)
    return (numbers * (scale.cast(FLOAT32) if isinstance(scale, Tensor) else scale)).cast(made)


def _codes(
    input: Tensor,
    scale: Tensor | Number,
    zero: Tensor | Number | None,
    limits: tuple[Tensor | Number, Tensor | Number],
    made: DType,
    zero_first: bool = False,
) -> Tensor:
    """PyTorch multiplies by the inverse of a scale. Halves are rounded to even numbers, so that it matters whether zero
    points are added before.
    """
    if not made.is_integer:
        raise OpRefusal(f"given dtype={made}, expected integers")
    inverse = 1.0 / scale.cast(FLOAT32) if isinstance(scale, Tensor) else 1.0 / scale
    codes = input.cast(FLOAT32) * inverse
    if isinstance(zero, int) and isinstance(limits[0], int) and isinstance(limits[1], int) and not zero_first:
        found = rounded_code(codes.expr, zero, (limits[0], limits[1]), made)
        if found is not None:
            return codes.with_expr(found, made)
    codes = codes if zero_first else round_(codes)
    if zero is not None:
        codes = codes + (zero.cast(FLOAT32) if isinstance(zero, Tensor) else zero)
    codes = round_(codes) if zero_first else codes
    low, high = limits
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        return clamp_tensor(codes, low.cast(FLOAT32), high.cast(FLOAT32)).cast(made)
    return clamp(codes, low, high).cast(made)


def _in_blocks(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero: Tensor | None, of: Any, *arguments: Any
) -> Tensor:
    """What `of` makes of a tensor, with a scale and a zero point for each block of some sizes."""
    if len(block_size) != len(input.shape) or any(
        size < 1 or extent % size for size, extent in zip(block_size, input.shape, strict=True)
    ):
        raise OpRefusal(f"given blocks of {list(block_size)}, expected sizes that divide {list(input.shape)}")
    split: list[int] = []
    places: list[int] = []
    for size, extent in zip(block_size, input.shape, strict=True):
        split += [extent // size, size]
        places += [extent // size, 1]
    if prod(scale.shape) != prod(places):
        raise OpRefusal(f"given scales {list(scale.shape)}, expected one for each of {prod(places)} blocks")
    zeros = None if zero is None or 0 in zero.shape else zero.reshape(places)
    *outer, size = block_size
    if all(n == 1 for n in outer) and scale.ref is not None and (zeros is None or zeros.ref is not None):
        group = {-1: group_of(arange(input.trace, input.shape[-1]), size)}
        whole = [None if each is None else picked(each.reshape(places[::2]), group) for each in (scale, zeros)]
        return _of_tensor(of(input, *whole, *arguments))
    return _of_tensor(of(input.reshape(split), scale.reshape(places), zeros, *arguments)).reshape(input.shape)


def _of_tensor(made: Any) -> Tensor:
    assert isinstance(made, Tensor)
    return made


def _group(input: Tensor, group_size: int) -> int:
    """The columns of a group; more than there are stand for all of them."""
    if len(input.shape) != 2:
        raise OpRefusal(f"given {list(input.shape)}, expected a matrix")
    return min(group_size, input.shape[1])


def _channels(input: Tensor, axis: int) -> tuple[int, ...]:
    """The shape of a number for each position along a dimension, beside the dimensions behind it."""
    rank = len(input.shape)
    dim = normalize_dim(axis, rank)
    return (input.shape[dim], *(1,) * (rank - dim - 1))


def _single(tensor: Tensor, beside: Tensor) -> Tensor:
    if prod(tensor.shape) != 1:
        raise OpRefusal(f"given {list(tensor.shape)} for {list(beside.shape)}, expected a tensor of one element")
    return tensor.reshape(())


def _check_codes(input: Tensor, dtype: object) -> None:
    if data_type(dtype) != input.dtype:
        raise OpRefusal(f"given codes of {input.dtype} and dtype={dtype}, expected them alike")


def _made(out_dtype: object) -> DType:
    return FLOAT32 if out_dtype is None else data_type(out_dtype)


@op("aten._weight_int8pack_mm.default", work=Work.ANCHOR, flops=flops)
def weight_int8pack_mm(self: Tensor, mat2: Tensor, scales: Tensor) -> Tensor:
    """``self @ (mat2 * scales).T``, the rows of `mat2` being integers and each having a scale."""
    if len(self.shape) != 2 or len(mat2.shape) != 2 or scales.shape != mat2.shape[:1]:
        given = ", ".join(str(list(tensor.shape)) for tensor in (self, mat2, scales))
        raise OpRefusal(f"given {given}, expected two matrices and a scale for each row of the second")
    return product(self, (mat2.cast(self.dtype) * scales.cast(self.dtype).reshape((-1, 1))).swap(0, 1))


@op("aten._weight_int4pack_mm.default", work=Work.ANCHOR, flops=flops)
def weight_int4pack_mm(self: Tensor, mat2: Tensor, qGroupSize: int, qScaleAndZeros: Tensor) -> Tensor:
    """``self @ ((code - 8) * scale + zero).T``, of codes as 16 by 8 tiles of a tensor core's operand lie in registers.

    Args:
        self: [rows, columns].
        mat2: int32 [n / 8, columns / (32 words), 32, words]: by eights of rows, and by lanes, each with two tiles to a
            word.
        qGroupSize: Columns that share a scale.
        qScaleAndZeros: [columns / `qGroupSize`, n, 2].
    """
    if len(mat2.shape) != 4 or mat2.dtype != INT32 or mat2.shape[2] != 32:
        given = f"{mat2.dtype}{list(mat2.shape)}"
        raise OpRefusal(f"given {given}, expected int32 [n / 8, columns / (32 words), 32, words]")
    eights, outer, _, words = mat2.shape
    rows, columns = 8 * eights, 32 * words * outer
    expected = (ceil_div(columns, qGroupSize), rows, 2)
    if self.shape[1:] != (columns,) or qScaleAndZeros.shape != expected:
        given = f"{list(self.shape)} and scales {list(qScaleAndZeros.shape)}"
        raise OpRefusal(f"given {given}, expected [.., {columns}] and {list(expected)} for groups of {qGroupSize}")
    words_of = mat2.reshape((eights, outer, 8, 4, words, 1, 1, 1))
    bit = arange(self.trace, 8).reshape((2, 2, 2)).cast(INT32) * 4  # by odd columns, then tiles, then halves of a tile
    codes = apply("and", apply("shr", words_of, bit), 15).permute((0, 2, 1, 4, 6, 7, 3, 5)).reshape((rows, columns))
    place = group_of(arange(self.trace, columns), qGroupSize)
    scale, zero = (
        picked(qScaleAndZeros.slice(2, part, 1).reshape((-1, rows)).swap(0, 1), {-1: place}).cast(FLOAT32)
        for part in (0, 1)
    )
    weight = (codes.cast(FLOAT32) - 8.0) * scale + zero
    return product(self, weight.cast(self.dtype).swap(0, 1))
