"""Cases of running sums, products and extrema."""

from __future__ import annotations

import torch

from tests.ops.cases import INT, Case, Operand, booleans, case, floats, integers, refused, values

NAN, INF = float("nan"), float("inf")
_HOSTILE = values(1.0, 3.0, 3.0, -INF, 2.0, INF, INF, NAN, 4.0, NAN, -7.0)
_TURNED = floats(40, 5, 3).through("aten.permute.default", (2, 1, 0))
_ENDS = Operand((3, 2), INT, data=(2.0**62, -(2.0**63), 2.0**62, 1.0, -(2.0**63), -1.0))


def _along(op: str, low: float = -2.0, high: float = 2.0) -> list[Case]:
    """Rows and columns, some of which take several tiles of a block, or several blocks."""
    shapes = ((7,), (5, 40), (3, 1), (1, 700), (2, 3, 130))
    return [
        *(case(op, floats(*shape, low=low, high=high), -1) for shape in shapes),
        case(op, floats(70, 40, low=low, high=high), 0),
        case(op, floats(2, 9, 3, low=low, high=high), 1),
        case(op, floats(2, 0, 3), 1),
        case(op, floats(0), 0),
        case(op, floats(), 0),
    ]


SUMS = [
    *_along("cumsum.default"),
    *_along("cumprod.default", 0.97, 1.03)[3:7],
    *_along("logcumsumexp.default", -9.0, 9.0)[3:7],
    *(case(f"{name}.default", _TURNED, 2) for name in ("cumsum", "logcumsumexp")),
    *(case(f"{name}.default", _HOSTILE, 0) for name in ("cumsum", "cumprod", "logcumsumexp")),
    *(case("logcumsumexp.default", values(*row), 0) for row in ((-INF, -INF, 1.0), (INF, 1.0), (-300.0, 300.0))),
    *(case(f"{name}.default", _ENDS, 0) for name in ("cumsum", "cumprod")),  # which wrap around
    *(case(f"{name}.default", booleans(4, 50), 1) for name in ("cumsum", "cumprod")),
    case("cumsum.default", integers(3, 300, dtype="int32"), 1),
    case("cumsum.default", integers(4, 9, dtype="uint8", low=0, high=200), 0),
    case("cumsum.default", integers(4, 9), 1, dtype=torch.float32),
    case("cumprod.default", booleans(4, 9), 1, dtype=torch.float32),
    case("cumsum.default", floats(6, 9).through("aten.slice.Tensor", 1, 1, 9, 2), 1),
    case("cumsum.default", floats(2, 30_000, low=-0.01, high=0.01), 1),
    case("cumsum.default", floats(3000, 3, low=-0.1, high=0.1), 0),
    refused("floating point", "logcumsumexp.default", integers(4), 0),
]
_TIES = integers(4, 300, low=0, high=3)
EXTREMA = [
    *(
        case("cummax.default", operand, dim)
        for operand, dim in (
            (floats(5, 40), 1), (_HOSTILE, 0), (_TIES, 1), (_TIES, 0), (_ENDS, 0), (booleans(3, 20), 1),
            (integers(5, 7, dtype="uint8", low=0, high=9), 1), (values(-INF, -INF), 0), (values(0.0, -0.0, 0.0), 0),
            (floats(), 0), (floats(0, 3), 1), (floats(1, 5000), 1),
        )
    ),
    *(case("cummin.default", operand, 0) for operand in (floats(70, 40), _HOSTILE, _TIES, _ENDS)),
]  # fmt: skip

CASES = [*SUMS, *EXTREMA]
