"""Cases of matrix products, convolutions and poolings."""

from __future__ import annotations

import torch

from tests.ops.cases import Case, Operand, case, floats, integers, refused

WIDE = floats(5, 70)  # more than a tile, and no multiple of one
TURNED = floats(70, 5).through("aten.transpose.int", 0, 1)

LINEAR = [
    case("linear.default", WIDE, floats(33, 70), floats(33)),
    case("linear.default", WIDE, floats(33, 70)),
    case("linear.default", floats(2, 3, 70), floats(33, 70), floats(33)),
    case("linear.default", floats(70), floats(33, 70), floats(33)),
    case("linear.default", floats(1, 256), floats(9, 256), floats(9)),
    case("linear.default", floats(130, 40), floats(66, 40), floats(66)),
    case("linear.default", TURNED, floats(33, 70)),
    case("linear.default", WIDE, floats(70, 33).through("aten.transpose.int", 0, 1), floats(33)),
    case("linear.default", floats(0, 8), floats(3, 8)),
]

PRODUCTS = [
    case("matmul.default", WIDE, floats(70, 9)),
    case("matmul.default", floats(70), floats(70)),
    case("matmul.default", WIDE, floats(70)),
    case("matmul.default", floats(70), floats(70, 9)),
    case("matmul.default", floats(2, 5, 70), floats(70, 9)),
    case("matmul.default", floats(2, 5, 70), floats(2, 70, 9)),
    case("matmul.default", floats(2, 1, 5, 70), floats(3, 70, 9)),
    case("matmul.default", floats(2, 3, 5, 16), floats(2, 3, 7, 16).through("aten.transpose.int", -2, -1)),
    case("matmul.default", floats(5, 2, 16).through("aten.transpose.int", 0, 1), floats(2, 16, 3)),
    case("matmul.default", floats(2, 5, 16), floats(16)),
    case("matmul.default", floats(16), floats(2, 16, 3)),
    case("matmul.default", floats(3, 0), floats(0, 4)),
    case("matmul.default", floats(0, 3), floats(3, 4)),
    refused("expected floating point", "matmul.default", integers(3, 4), integers(4, 2)),
    case("mv.default", floats(5, 8), floats(8)),
    case("dot.default", floats(64), floats(64)),
    case("mm.default", WIDE, floats(70, 9)),
    case("mm.default", TURNED, floats(70, 9)),
    case("mm.default", floats(1, 1), floats(1, 1)),
    case("bmm.default", floats(3, 5, 16), floats(3, 16, 4)),
    case("bmm.default", floats(3, 1, 40), floats(3, 40, 4)),
    case("addmm.default", floats(9), WIDE, floats(70, 9)),
    case("addmm.default", floats(5, 9), WIDE, floats(70, 9), beta=0.5, alpha=2),
    case("addmm.default", floats(5, 1), WIDE, floats(70, 9), beta=0),
    case("baddbmm.default", floats(3, 5, 4), floats(3, 5, 16), floats(3, 16, 4), beta=2, alpha=0.5),
    case("baddbmm.default", floats(1, 5, 1), floats(3, 5, 16), floats(3, 16, 4)),
]

_CODES = integers(33, 70, low=-128, high=128, dtype="int8")
_LIMITS = -128, 127, torch.int8
DEQUANTISED = [
    Case("quantized_decomposed.dequantize_per_channel.default", (_CODES, floats(33), integers(33), 0, *_LIMITS)),
    Case("quantized_decomposed.dequantize_per_channel.default", (_CODES, floats(70), None, -1, *_LIMITS)),
    Case("quantized_decomposed.dequantize_per_tensor.default", (_CODES, 0.25, -3, *_LIMITS)),
    Case(
        "quantized_decomposed.dequantize_per_tensor.default",
        (_CODES, 0.25, -3, 0, 255, torch.uint8),
        refusal="given codes of int8 and dtype=uint8",
    ),
]

_IMAGE, _KERNEL = floats(1, 3, 9, 8), floats(5, 3, 3, 3)
CONVOLUTIONS = [
    case("conv2d.default", _IMAGE, _KERNEL),
    refused("expected floating point", "conv2d.default", integers(1, 3, 9, 8), integers(5, 3, 3, 3)),
    case("conv2d.default", _IMAGE, _KERNEL, floats(5), (1, 1), (1, 1)),
    case("conv2d.default", floats(2, 3, 9, 8), _KERNEL, floats(5), (2, 1), (0, 2), (1, 1)),
    case("conv2d.default", floats(2, 3, 9, 8), _KERNEL, None, (1, 1), (2, 2), (2, 2)),
    case("conv2d.default", floats(2, 66, 5, 5), floats(70, 66, 1, 1), floats(70)),
    case("conv2d.default", floats(1, 64, 6, 6), floats(128, 64, 3, 3), floats(128), (2, 2), (1, 1)),
    case("conv2d.default", floats(1, 3, 20, 20), floats(64, 3, 7, 7), None, (2, 2), (3, 3)),
    case("conv2d.default", floats(2, 6, 5, 5), floats(8, 3, 3, 3), floats(8), (1, 1), (1, 1), (1, 1), 2),
    case("conv2d.default", floats(2, 6, 5, 5), floats(6, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 6),
    case("conv2d.default", floats(1, 1, 1, 1), floats(1, 1, 1, 1)),
    case("conv2d.default", floats(1, 9, 8, 3).through("aten.permute.default", (0, 3, 1, 2)), _KERNEL),
    case("convolution.default", _IMAGE, _KERNEL, floats(5), (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
    case("convolution.default", _IMAGE, _KERNEL, None, (2, 2), (0, 0), (1, 1), False, (0, 0), 1),
    case("convolution.default", floats(2, 4, 9), floats(6, 2, 3), None, (2,), (1,), (1,), False, (0,), 2),
    case("conv2d.padding", _IMAGE, _KERNEL, floats(5), (1, 1), "same"),
    case("conv2d.padding", _IMAGE, floats(5, 3, 2, 4), None, (1, 1), "same", (1, 1)),
    case("conv2d.padding", floats(2, 6, 9, 8), floats(6, 1, 3, 2), None, (1, 1), "same", (2, 1), 6),
    case("conv2d.padding", _IMAGE, _KERNEL, None, (2, 2), "valid"),
    case("conv1d.default", floats(2, 4, 9), floats(6, 4, 3)),
    case("conv1d.default", floats(2, 4, 9), floats(6, 2, 3), floats(6), (2,), (2,), (2,), 2),
    case("conv1d.padding", floats(2, 4, 9), floats(6, 4, 4), floats(6), (1,), "same", (2,)),
    case("conv1d.padding", floats(2, 4, 9), floats(6, 2, 3), None, (2,), "valid", (1,), 2),
]  # fmt: skip

POOLINGS = [
    case("max_pool2d.default", floats(2, 5, 9, 8), (3, 3), (2, 2), (1, 1)),
    case("max_pool2d.default", floats(2, 5, 9, 8), (2, 3)),
    case("max_pool2d.default", floats(1, 70, 7, 7), (3, 3), (2, 2), (0, 0), (2, 2)),
    case("max_pool2d.default", floats(1, 2, 6, 6), (3, 3), (2, 2), (0, 0), (1, 1), True),
    case("max_pool2d.default", floats(5, 9, 8), (2, 2)),
    case("max_pool2d.default", floats(1, 2, 4, 4, low=-9, high=-8), (3, 3), (1, 1), (1, 1)),
    case("avg_pool2d.default", floats(2, 5, 9, 8), (3, 3), (2, 2), (1, 1)),
    case("avg_pool2d.default", floats(2, 5, 9, 8), (3, 3), (2, 2), (1, 1), False, False),
    case("avg_pool2d.default", floats(2, 5, 9, 8), (2, 2), (2, 2), (0, 0), False, True, 3),
    case("avg_pool2d.default", floats(1, 2, 6, 6), (3, 3), (2, 2), (1, 1), True),
    case("avg_pool2d.default", floats(5, 8, 8), (2, 2)),
    case("avg_pool1d.default", floats(2, 5, 9), (3,), (2,), (1,)),
    case("avg_pool1d.default", floats(5, 9), (3,), (2,), (1,), True, False),
    case("avg_pool1d.default", floats(2, 5, 9), (2,)),
    case("max_pool1d.default", floats(2, 5, 9), (3,), (2,), (1,), (2,), True),
    case("max_pool1d.default", floats(5, 9), (2,)),
    case("adaptive_avg_pool1d.default", floats(2, 5, 7), (3,)),
    case("adaptive_avg_pool1d.default", floats(5, 8), (1,)),
    case("adaptive_avg_pool2d.default", floats(2, 5, 7, 7), (1, 1)),
    case("adaptive_avg_pool2d.default", floats(2, 5, 7, 6), (3, 4)),
    case("adaptive_avg_pool2d.default", floats(1, 70, 4, 4), (2, 2)),
    case("adaptive_avg_pool2d.default", floats(1, 2, 3, 3), (5, 7)),
    case("adaptive_avg_pool2d.default", floats(5, 8, 8), (1, 1)),
    case("adaptive_avg_pool2d.default", floats(1, 2, 7, 7), (7, 1)),
]

_HEADS, _KEYS = floats(2, 4, 5, 16), floats(2, 4, 7, 16)
_SHARED = floats(2, 2, 7, 16)  # by two query heads each
_NAME = "scaled_dot_product_attention.default"
ATTENTION = [
    case(_NAME, _HEADS, _KEYS, _KEYS),
    case(_NAME, _HEADS, _KEYS, floats(2, 4, 7, 16), scale=0.5),
    case(_NAME, _HEADS, _HEADS, _HEADS, is_causal=True),
    case(_NAME, _HEADS, _KEYS, _KEYS, floats(5, 7)),
    case(_NAME, _HEADS, _KEYS, _KEYS, floats(2, 1, 5, 7)),
    case(_NAME, _HEADS, _KEYS, _KEYS, Operand((1, 1, 5, 7), "bool", data=(1, 0, 1, 0, 1, 1, 1) * 5)),
    case(_NAME, _HEADS, _SHARED, _SHARED, enable_gqa=True),
    case(_NAME, _HEADS, _SHARED, _SHARED, floats(1, 1, 5, 7), 0.0, False, scale=2.0, enable_gqa=True),
    case(_NAME, floats(2, 4, 1, 16), _KEYS, _KEYS),
    case(_NAME, floats(3, 5, 16), floats(3, 7, 16), floats(3, 7, 16)),
]
# the weights of a row are rounded to the compute dtype before they meet the values
ATTENTION = [attention.storing(2) for attention in ATTENTION]
ATTENTION.append(refused("dropout_p=0.5", _NAME, _HEADS, _KEYS, _KEYS, None, 0.5))

CASES = [*LINEAR, *PRODUCTS, *DEQUANTISED, *CONVOLUTIONS, *POOLINGS, *ATTENTION]
