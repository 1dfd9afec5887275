"""Tensors stored in codes. What reads the numbers may read the codes themselves: see `lowering.dequantisation`."""

from __future__ import annotations

from npu_compiler.dtypes import FLOAT32, DType
from npu_compiler.dtypes import dtype as data_type
from npu_compiler.ops.linear import flops, product
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.shapes import OpRefusal, normalize_dim
from npu_compiler.tensor.symbolic import Tensor


@op("quantized_decomposed.dequantize_per_channel.default", work=Work.ELEMENTWISE)
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
    rank = len(input.shape)
    dim = normalize_dim(axis, rank)
    channels = (input.shape[dim], *(1,) * (rank - dim - 1))
    numbers = input.cast(FLOAT32)
    if zero_points is not None:
        numbers = numbers - zero_points.reshape(channels).cast(FLOAT32)
    return (numbers * scales.reshape(channels)).cast(_made(out_dtype))


@op("quantized_decomposed.dequantize_per_tensor.default", work=Work.ELEMENTWISE)
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
    return ((input.cast(FLOAT32) - zero_point) * scale).cast(_made(out_dtype))


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
