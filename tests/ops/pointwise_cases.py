"""Cases of pointwise mathematics, and of elements in other places."""

from __future__ import annotations

from tests.ops.cases import case, floats, integers, refused, values

NAN, INF = float("nan"), float("inf")
SPECIAL = values(NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5, 100.0)
HALVES = values(-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 0.49, -0.51, 7.0, -7.0, 1023.5)
MATRIX, ROW = floats(3, 8), floats(8)
POSITIVE, SMALL, UNIT = (
    floats(3, 8, low=0.1, high=9),
    floats(3, 8, low=-0.01, high=0.01),
    floats(3, 8, low=-0.9, high=0.9),
)
WHOLE = integers(4, 5, low=-9, high=10)
SIGNS = values(5.0, -5.0, 5.0, -5.0, 4.0)
BOTH_NANS = values(1.0, 1.0, NAN, NAN, 2.0, -2.0, INF, -INF)

ROUNDINGS = [
    *(case(f"{name}.default", x) for name in ("sign", "trunc", "round") for x in (MATRIX, HALVES, SPECIAL, WHOLE)),
    *(case("frac.default", x) for x in (MATRIX, HALVES)),
    refused("floating point", "frac.default", WHOLE),
]

TESTS = [
    *(
        case(f"{name}.default", x)
        for name in ("isnan", "isinf", "isfinite", "isposinf", "isneginf")
        for x in (SPECIAL, MATRIX)
    ),
    case("isnan.default", WHOLE),
    case("logical_xor.default", values(0.0, 0.0, 2.0, -3.0), values(0.0, 1.0, 0.0, 4.0)),
    case("logical_xor.default", WHOLE, integers(5, low=-1, high=2)),
]

LIMITS = [
    case("clamp_max.default", MATRIX, 0.25),
    case("clamp_max.default", SPECIAL, 1.0),
    case("clamp_max.default", WHOLE, 3),
    case("clamp_min.Tensor", MATRIX, ROW),
    case("clamp_max.Tensor", MATRIX, ROW),
    *(case(f"{name}.default", MATRIX, ROW) for name in ("fmax", "fmin")),
    *(case(f"{name}.default", SPECIAL, BOTH_NANS) for name in ("fmax", "fmin")),
    case("fmax.default", WHOLE, integers(5)),
]

REMAINDERS = [
    *(case(f"{name}.Scalar", HALVES, divisor) for name in ("fmod", "remainder") for divisor in (2.0, -0.75)),
    *(case(f"{name}.Tensor", MATRIX, floats(8, low=0.5, high=2)) for name in ("fmod", "remainder")),
    *(
        case(f"{name}.Tensor", values(5.0, -5.0, 5.0, -5.0, 4.0), values(3.0, 3.0, -3.0, -3.0, 2.0))
        for name in ("fmod", "remainder")
    ),
]

MIXES = [
    *(case("lerp.Scalar", MATRIX, floats(3, 8), weight) for weight in (0.0, 0.3, 0.7, 1.0)),
    case("lerp.Tensor", MATRIX, floats(3, 8), UNIT),
    case("addcdiv.default", MATRIX, floats(3, 8), POSITIVE),
    case("addcdiv.default", MATRIX, ROW, POSITIVE, value=-2),
    case("hypot.default", MATRIX, ROW),
    case("hypot.default", values(0.0, 3.0, 200.0, -INF), values(0.0, -4.0, 210.0, 1.0)),
    case("logaddexp.default", MATRIX, ROW),
    case("logaddexp.default", values(200.0, -200.0, 3.0, -INF, INF), values(201.0, -200.0, 3.0, 1.0, INF)),
    case("xlogy.Tensor", MATRIX, POSITIVE),
    case("xlogy.Tensor", values(0.0, 0.0, 2.0), values(0.0, NAN, 3.0)),
    case("heaviside.default", SPECIAL, values(0.5, 0.5, 0.5, 0.5, 2.0, 0.5, 0.5, 0.5)),
]

FUNCTIONS = [
    case("square.default", MATRIX),
    case("square.default", WHOLE),
    case("reciprocal.default", POSITIVE),
    case("reciprocal.default", integers(6, low=1, high=9)),
    *(case(f"{name}.default", x) for name in ("expm1", "sinh", "asinh") for x in (MATRIX, SMALL, POSITIVE)),
    *(case("log1p.default", x) for x in (SMALL, POSITIVE, integers(5, low=0, high=9))),
    case("log1p.default", UNIT),
    case("expm1.default", values(-30.0, -1.0, 0.0, 1.0, 9.0, INF, -INF, NAN)),
    case("cosh.default", MATRIX),
    case("acosh.default", floats(3, 8, low=1.05, high=9)),
    case("atanh.default", UNIT),
    case("atanh.default", SMALL),
    case("exp2.default", MATRIX),
    case("log2.default", POSITIVE),
    case("log10.default", POSITIVE),
    case("tan.default", UNIT),
    case("deg2rad.default", floats(3, 8, low=-180, high=180)),
    case("rad2deg.default", MATRIX),
]

PLACES = [
    case("repeat.default", floats(2, 3), (2, 2)),
    case("tile.default", floats(2, 3), (2, 2)),
    case("tile.default", floats(2, 3), (2,)),
    case("tile.default", floats(3), (2, 1)),
    case("repeat.default", floats(2, 3), (4, 1, 2)),
    case("repeat.default", floats(3), (1,)),
    case("repeat.default", integers(2, 3), (3, 2)),
    case("repeat.default", floats(2, 3), (0, 2)),
    case("pixel_shuffle.default", floats(2, 8, 3, 5), 2),
    case("pixel_shuffle.default", floats(9, 2, 2), 3),
    case("pixel_unshuffle.default", floats(2, 2, 6, 4), 2),
    case("channel_shuffle.default", floats(2, 6, 3, 2), 3),
    case("roll.default", floats(3, 8), (2,), (1,)),
    case("roll.default", floats(3, 8), (-1, 11), (0, -1)),
    case("roll.default", floats(3, 8), (5,)),
    case("roll.default", integers(7), (7,), (0,)),
    case("outer.default", floats(5), floats(8)),
]

CASES = [*ROUNDINGS, *TESTS, *LIMITS, *REMAINDERS, *MIXES, *FUNCTIONS, *PLACES]
