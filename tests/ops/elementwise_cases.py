"""Cases of arithmetic, comparisons, activations and conversions."""

from __future__ import annotations

import torch

from tests.ops.cases import Case, booleans, case, floats, integers, refused, values

NAN, INF = float("nan"), float("inf")
SPECIAL = values(NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5, 100.0)
ROW, MATRIX, IMAGE = floats(8), floats(3, 8), floats(2, 3, 4, 5)
NEARLY_WHOLE = values(0.5, 1.0, 1.5, -0.5, -1.0, 3.0, 0.0)  # by 0.1: a little less than a whole number of times
COLUMN, SCALAR, EMPTY = floats(3, 1), floats(), floats(0, 4)
TRANSPOSED = floats(8, 3).through("aten.transpose.int", 0, 1)


def _binary(name: str) -> list[Case]:
    """A binary op on operands of every form, and with a Python number."""
    return [
        case(f"{name}.Tensor", MATRIX, floats(3, 8)),
        case(f"{name}.Tensor", MATRIX, ROW),
        case(f"{name}.Tensor", COLUMN, ROW),
        case(f"{name}.Tensor", SCALAR, MATRIX),
        case(f"{name}.Tensor", MATRIX, TRANSPOSED),
        case(f"{name}.Tensor", IMAGE, floats(3, 1, 1)),
        case(f"{name}.Tensor", EMPTY, floats(4)),
        case(f"{name}.Tensor", MATRIX, 0.5),
        case(f"{name}.Scalar", MATRIX, 3),
    ]


ARITHMETIC = [
    *_binary("add"),
    case("add.Tensor", MATRIX, ROW, alpha=3),
    case("add.Tensor", floats(2, 3, 4), floats(3, 4).through("aten.expand.default", (2, 3, 4)), alpha=-0.5),
    case("add.Tensor", integers(4, 5), integers(5)),
    case("add.Tensor", integers(4, 5), integers(5), alpha=2),
    case("add.Tensor", integers(4, 5, dtype="int32"), integers(4, 5)),
    case("add.Tensor", integers(4), floats(4)),
    case("add.Tensor", booleans(6), booleans(6)),
    case("add.Tensor", booleans(6), integers(6)),
    case("add.Tensor", integers(40, low=0, high=256, dtype="uint8"), integers(40, low=0, high=256, dtype="uint8")),
    case("add.Scalar", integers(4), 0.5),
    case("add.Scalar", booleans(4), 2),
    case("add.Tensor", floats(1, 1), floats(1)),
    case("add.Tensor", floats(2, 1, 2, 1, 2, 1, 2, 1), floats(1, 2, 1, 2, 1, 2, 1, 2)),
    *_binary("sub"),
    case("sub.Tensor", MATRIX, ROW, alpha=2),
    case("sub.Tensor", integers(30, low=0, high=256, dtype="uint8"), 7),
    case("rsub.Tensor", MATRIX, ROW),
    case("rsub.Tensor", MATRIX, ROW, alpha=2),
    case("rsub.Scalar", MATRIX, 1.0),
    case("rsub.Scalar", integers(4), 3),
    *_binary("mul"),
    case("mul.Tensor", integers(4, 5), 3),
    case("mul.Tensor", integers(4), floats(4)),
    case("mul.Tensor", booleans(6), booleans(6)),
    case("mul.Tensor", booleans(6), floats(6)),
    case("div.Tensor", MATRIX, floats(3, 8, low=0.5, high=2)),
    case("div.Tensor", MATRIX, floats(8, low=-2, high=-0.5)),
    case("div.Tensor", TRANSPOSED, COLUMN),
    case("div.Tensor", MATRIX, 2.0),
    case("div.Scalar", MATRIX, 3),
    case("div.Tensor", integers(5), integers(5, low=1, high=4)),
    case("div.Scalar", integers(5), 2),
    case("div.Tensor", SPECIAL, 0.0),
    case("div.Tensor", EMPTY, 2.0),
    case("div.Tensor_mode", MATRIX, floats(8, low=0.6, high=2), rounding_mode="floor"),
    case("div.Tensor_mode", MATRIX, ROW, rounding_mode=None),
    case("div.Scalar_mode", MATRIX, 0.75, rounding_mode="floor"),
    case("div.Scalar_mode", NEARLY_WHOLE, 0.1, rounding_mode="floor"),
    case("div.Scalar_mode", NEARLY_WHOLE, -0.1, rounding_mode="floor"),
    case("div.Tensor_mode", NEARLY_WHOLE, values(0.25, -0.25, 0.5, -0.5, 0.125, -0.125, 1.5), rounding_mode="floor"),
    case("div.Tensor_mode", integers(6), 0.1, rounding_mode="floor"),
    case("div.Scalar_mode", SPECIAL, 0.75, rounding_mode="floor"),
    case("div.Scalar_mode", SPECIAL, 0.0, rounding_mode="floor"),
    case("div.Tensor_mode", SPECIAL, values(1.0, 2.0, -2.0, 3.0, 0.0, INF, INF, -INF), rounding_mode="floor"),
    case("div.Tensor_mode", MATRIX, floats(8, low=0.6, high=2), rounding_mode="trunc"),
    case("div.Tensor_mode", SPECIAL, 0.75, rounding_mode="trunc"),
    case("div.Scalar_mode", MATRIX, -0.75, rounding_mode="trunc"),
    case("div.Tensor_mode", integers(4), integers(4, low=1), rounding_mode="trunc"),
    case("div.Tensor_mode", integers(4), integers(4, low=1), rounding_mode="floor"),
]

_DOMAIN = {"log": floats(3, 8, low=0.1, high=4), "sqrt": floats(3, 8, low=0, high=4)}
_DOMAIN |= {"rsqrt": floats(3, 8, low=0.1, high=4), "sin": floats(3, 8, low=-6, high=6)}
_DOMAIN |= {"cos": floats(3, 8, low=-6, high=6), "tanh": floats(3, 8, low=-4, high=4)}
_FLOATING = ("exp", "log", "sqrt", "rsqrt", "sin", "cos", "tanh", "erf", "sigmoid")

UNARY = [
    *(case(f"{name}.default", _DOMAIN.get(name, MATRIX)) for name in _FLOATING),
    *(case(f"{name}.default", SPECIAL) for name in _FLOATING),
    *(case(f"{name}.default", integers(6, low=1, high=5)) for name in _FLOATING),
    *(case(f"{name}.default", operand) for name in ("neg", "abs", "relu") for operand in (MATRIX, SPECIAL)),
    *(case(f"{name}.default", integers(9)) for name in ("neg", "abs", "relu")),
    *(case(f"{name}.default", operand) for name in ("floor", "ceil") for operand in (MATRIX, SPECIAL, integers(5))),
    *(case(f"{name}.default", operand) for name in ("silu", "gelu") for operand in (MATRIX, TRANSPOSED, SCALAR)),
    case("silu.default", values(NAN, INF, 0.0, -80.0, 80.0)),
    case("gelu.default", values(NAN, INF, 0.0, -20.0, 20.0)),
    case("gelu.default", floats(3, 8, low=-4, high=4), approximate="tanh"),
    case("gelu.default", values(NAN, INF, 0.0, -20.0, 20.0), approximate="tanh"),
    case("relu.default", EMPTY),
    case("relu.default", floats(1)),
    case("neg.default", IMAGE.through("aten.permute.default", (0, 2, 3, 1))),
    case("hardtanh.default", floats(3, 8, low=-3, high=3)),
    case("hardtanh.default", floats(3, 8, low=-3, high=9), 0.0, 6.0),
    case("clamp.default", MATRIX, -0.5, 1.0),
    case("clamp.default", MATRIX, None, 0.25),
    case("clamp.default", SPECIAL, -1.0),
    case("clamp.default", MATRIX, 1.0, -1.0),
    case("clamp.default", integers(9), -2, 3),
    case("clamp.default", integers(9), -1.5, 1.5),
    case("clamp.Tensor", MATRIX, floats(MATRIX.shape[-1]), floats(1)),
    case("clamp.Tensor", MATRIX, None, floats(MATRIX.shape[-1])),
    case("clamp.Tensor", SPECIAL, values(0.5)),
    case("clamp.Tensor", integers(9), integers(9), integers(1)),
    case("clamp_min.default", MATRIX, 0.1),
    case("clamp_min.default", SPECIAL, 0.1),
    case("dropout.default", MATRIX, 0.5, False),
    case("dropout.default", MATRIX, 0.0, True),
    refused("model.eval()", "dropout.default", MATRIX, 0.5, True),
    case("feature_dropout.default", IMAGE, 0.5, False),
]

_BASES, _WHOLE = floats(3, 8, low=-3, high=3), values(-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 2.0, 3.0)
_WIDE = floats(3, 8, low=-4, high=4)
ACTIVATIONS = [
    *(
        case(f"{name}.default", operand)
        for name in ("leaky_relu", "elu", "celu", "selu", "softplus", "log_sigmoid", "mish", "hardsigmoid", "hardswish")
        for operand in (_WIDE, SPECIAL)
    ),
    *(case(f"{name}.default", operand) for name in ("hardshrink", "softshrink") for operand in (_WIDE, SPECIAL)),
    case("leaky_relu.default", TRANSPOSED, 0.3),
    case("elu.default", _WIDE, 1.5, 2.0, 0.5),
    case("celu.default", _WIDE, -1.5),
    case("softplus.default", values(-15.0, -9.0, -3.0, 4.0, 9.0, 12.0), 2, 20),
    case("log_sigmoid.default", values(-90.0, -9.0, 3.0, 7.0, 90.0)),
    case("hardshrink.default", _WIDE, 1.25),
    case("softshrink.default", _WIDE, 1.25),
    case("threshold.default", _WIDE, 0.5, -7.0),
    case("threshold.default", SPECIAL, 0.5, -7.0),
    case("prelu.default", IMAGE, floats(3)),
    case("prelu.default", MATRIX, floats(1)),
    case("prelu.default", SPECIAL, floats(1)),
    case("glu.default", MATRIX),
    case("glu.default", IMAGE, 2),
    case("glu.default", IMAGE, -2),
    refused("expected floating point", "hardshrink.default", integers(3)),
]
POWERS = [
    *(case("pow.Tensor_Scalar", _BASES, exponent) for exponent in (0, 1, 2, 3, 4, 5, -1, -2, -3, 2.0, 3.0, 0.0)),
    *(case("pow.Tensor_Scalar", floats(3, 8, low=0.1, high=3), exponent) for exponent in (0.5, -0.5, 1.7, -1.3)),
    *(case("pow.Tensor_Scalar", SPECIAL, exponent) for exponent in (2, 3, 0.5, -0.5, -1, 0, 2.5)),
    case("pow.Tensor_Scalar", integers(6), 2),
    case("pow.Tensor_Scalar", integers(6), 3),
    case("pow.Tensor_Scalar", integers(6), 2.0),
    case("pow.Tensor_Scalar", integers(6, low=1), 0.5),
    case("pow.Tensor_Scalar", integers(6), 5),
    case("pow.Tensor_Tensor", floats(3, 8, low=0.1, high=3), ROW),
    case("pow.Tensor_Tensor", _WHOLE, values(3.0, 2.0, -1.0, 0.5, 0.0, -2.0, -1.5, 4.0)),
    case("pow.Tensor_Tensor", floats(8, low=0.1, high=3), integers(8)),
    case("pow.Scalar", 2, MATRIX),
    case("pow.Scalar", 0.5, integers(5)),
    case("pow.Scalar", -2.0, MATRIX),
]

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
COMPARISONS = [
    *(case(f"{name}.Tensor", MATRIX, ROW) for name in _COMPARISONS),
    *(case(f"{name}.Tensor", integers(4, 6, low=0, high=3), integers(6, low=0, high=3)) for name in _COMPARISONS),
    *(case(f"{name}.Tensor", SPECIAL, values(NAN, INF, 0.0, -0.0, 0.0, 1.5, 1.5, -INF)) for name in _COMPARISONS),
    *(case(f"{name}.Scalar", MATRIX, 0.25) for name in _COMPARISONS),
    *(case(f"{name}.Scalar", integers(6), 1) for name in _COMPARISONS),
    case("gt.Scalar", integers(6), 0.5),
    case("eq.Tensor", booleans(6), booleans(6)),
    case("eq.Scalar", booleans(6), 1),
    case("lt.Tensor", integers(4), floats(4)),
    case("gt.Scalar", EMPTY, 0.0),
]

_FLAGS = integers(8, low=-1, high=2)
LOGIC = [
    *(case("logical_not.default", operand) for operand in (booleans(6), _FLAGS, SPECIAL)),
    *(case(f"logical_{name}.default", booleans(3, 6), booleans(6)) for name in ("and", "or")),
    *(case(f"logical_{name}.default", _FLAGS, integers(8, low=0, high=2)) for name in ("and", "or")),
    *(case(f"logical_{name}.default", SPECIAL, _FLAGS) for name in ("and", "or")),
    case("bitwise_not.default", booleans(6)),
    case("bitwise_not.default", integers(6)),
    case("bitwise_not.default", integers(20, low=0, high=256, dtype="uint8")),
    *(case(f"bitwise_{name}.Tensor", booleans(3, 6), booleans(6)) for name in ("and", "or", "xor")),
    *(case(f"bitwise_{name}.Tensor", integers(9), integers(9)) for name in ("and", "or", "xor")),
    *(case(f"bitwise_{name}.Scalar", integers(9), 6) for name in ("and", "or", "xor")),
    *(case(f"__{name}__.Tensor", booleans(9), booleans(9)) for name in ("and", "or", "xor")),
]

_MASK = booleans(3, 8)
CHOICES = [
    case("where.self", _MASK, MATRIX, floats(3, 8)),
    case("where.self", booleans(3, 1), ROW, SCALAR),
    case("where.self", booleans(8, 3).through("aten.transpose.int", 0, 1), MATRIX, SPECIAL),
    case("where.self", _MASK, integers(3, 8), integers(8)),
    case("where.self", _MASK, integers(3, 8), floats(8)),
    case("where.ScalarOther", _MASK, MATRIX, -INF),
    case("where.ScalarOther", _MASK, integers(3, 8), 0),
    case("where.ScalarSelf", _MASK, 0.5, MATRIX),
    case("where.ScalarSelf", _MASK, 1.5, integers(3, 8)),
    case("where.Scalar", _MASK, 1.0, 0.0),
    case("where.Scalar", _MASK, 1, 0),
    case("masked_fill.Scalar", MATRIX, _MASK, -INF),
    case("masked_fill.Scalar", floats(2, 3, 8), _MASK, 0.0),
    case("masked_fill.Scalar", integers(3, 8), _MASK, 7),
    case("masked_fill.Scalar", booleans(3, 8), _MASK, True),
    case("masked_fill.Tensor", MATRIX, _MASK, SCALAR),
    case("maximum.default", MATRIX, ROW),
    case("minimum.default", MATRIX, ROW),
    case("maximum.default", SPECIAL, values(1.0, NAN, 1.0, -0.0, 0.0, NAN, 1.0, INF)),
    case("minimum.default", SPECIAL, values(1.0, NAN, 1.0, -0.0, 0.0, NAN, 1.0, INF)),
    case("maximum.default", integers(9), integers(9)),
    case("minimum.default", booleans(9), booleans(9)),
]

_EDGES = values(0.0, -0.0, 0.5, -0.5, 1.9, -1.9, 100.0, -100.0)
CONVERSIONS = [
    case("to.dtype", integers(3, 8), torch.float32),
    case("to.dtype", booleans(8), torch.float32),
    case("to.dtype", _EDGES, torch.int64),
    case("to.dtype", _EDGES, torch.int32),
    case("to.dtype", SPECIAL, torch.bool),
    case("to.dtype", integers(8, low=-1, high=2), torch.bool),
    case("to.dtype", booleans(8), torch.int64),
    case("to.dtype", integers(20, low=0, high=256), torch.uint8),
    case("to.dtype", integers(20, low=-300, high=300), torch.int8),
    case("to.dtype", MATRIX, torch.float16),
    case("to.dtype", MATRIX, torch.float32),
    case("to.dtype_layout", integers(4), dtype=torch.float32, device=torch.device("cpu")),
    case("to.device", MATRIX, torch.device("cpu"), torch.float32),
    case("_to_copy.default", integers(4), dtype=torch.float32),
    case("_to_copy.default", MATRIX),
    case("type_as.default", integers(4), floats(2)),
    case("type_as.default", floats(4), booleans(2)),
    refused("float64", "to.dtype", integers(4), torch.float64),
]


CASES = [*ARITHMETIC, *UNARY, *ACTIVATIONS, *POWERS, *COMPARISONS, *LOGIC, *CHOICES, *CONVERSIONS]
