"""Convolutions of codes: their sums are those of integers, and numbers are made of these."""

from __future__ import annotations

from typing import Any

from npu_compiler.dtypes import FLOAT32, INT8, INT32, UINT8
from npu_compiler.ops.convolution import IMAGES, convolve, filtering, sliding_of
from npu_compiler.ops.reduction import greatest, least, total
from npu_compiler.ops.registry import op
from npu_compiler.ops.traits import Work
from npu_compiler.tensor.reducing import reduce
from npu_compiler.tensor.symbolic import OpRefusal, Tensor, where

__all__ = ["coded_convolution", "filter_codes"]


@op("rewritten.filter_codes.default", work=Work.ROWS, exact=("scales", "bias"))
def filter_codes(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, scale: float, zero_point: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What `coded_convolution` asks of a filter, for an image whose codes stand for ``(code - zero_point) * scale``.

    Args:
        codes: [O, I, KH, KW] of int8, each of which stands for ``(code - zeros) * scales``.
        scales, zeros, bias: [O].
        scale, zero_point: Those of the image.

    Returns:
        The codes less their zero points, int8; for each output the factor of its sums, NaN where some of its codes do
        not fit eight bits so; and the term that is added to them.
    """
    outputs = codes.shape[0]
    centred = codes.cast(INT32)
    if zeros is not None:
        centred = centred - zeros.cast(INT32).reshape((outputs, 1, 1, 1))
    low, high, sum_ = (reduce(centred, each, (1, 2, 3), False)[0] for each in (least, greatest, total))
    bits = 8 * INT8.size
    fits = (low >= -(1 << (bits - 1))).cast(INT32) * (high < 1 << (bits - 1)).cast(INT32)
    factor = where(fits > 0, scales.cast(FLOAT32) * scale, float("nan"))
    term = sum_.cast(FLOAT32) * float(-zero_point) * factor
    return centred.cast(INT8), factor, term if bias is None else term + bias.cast(FLOAT32)


@filtering("rewritten.coded_convolution.default", images=IMAGES, exact=("factors", "terms"))
def coded_convolution(
    input: Tensor,
    weight: Tensor,
    factors: Tensor,
    terms: Tensor,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    outside: int = 0,
) -> Tensor:
    """``sum(input * weight) * factors + terms``: a convolution of images of int8 or uint8 by int8 filters.

    Args:
        input: [N, C, H, W] of codes.
        weight: [O, C / groups, KH, KW] of codes.
        factors, terms: [O].
        stride, padding, dilation, groups: Those of a convolution.
        outside: The code that stands for zero, which lies around the image.
    """
    if input.dtype not in (INT8, UINT8) or weight.dtype != INT8:
        raise OpRefusal(f"given {input.dtype} and {weight.dtype}, expected codes of int8 or uint8, and of int8")
    if len(input.shape) != 4 or len(weight.shape) != 4:
        raise OpRefusal(f"given {len(input.shape)} and {len(weight.shape)} dimensions, expected four each")
    sliding = sliding_of(weight.shape[2:], stride, padding, dilation)
    sums = convolve(input, weight, None, sliding, groups, outside)
    return sums * factors.reshape((-1, 1, 1)).cast(FLOAT32) + terms.reshape((-1, 1, 1)).cast(FLOAT32)
