"""Cases of sorting, and of finding elements by their rank."""

from __future__ import annotations

import random

from tests.ops.cases import INT, Operand, booleans, case, floats, integers, refused, values

NAN, INF = float("nan"), float("inf")
_HOSTILE = values(2.0, NAN, -INF, 0.0, -0.0, INF, NAN, -2.0, 0.0, INF, 1.0)
_TIES = integers(3, 300, low=0, high=3)
_ENDS = Operand((2, 4), INT, data=(2.0**62, -(2.0**63), 0.0, -1.0, 1.0, -(2.0**63), 2.0**62, -(2.0**62)))
_BYTES = integers(3, 20, low=0, high=250, dtype="uint8")


def _shuffled(*shape: int, dtype: str = "int32") -> Operand:
    """Rows in which no two elements are equal: of others PyTorch does not say which comes first."""
    generator = random.Random(str(shape))
    rows = [generator.sample(range(-shape[-1], shape[-1]), shape[-1]) for _ in range(shape[0])]
    return Operand(shape, dtype, data=tuple(float(number) for row in rows for number in row))


_FEW = _shuffled(4, 30, dtype="model")
SORTED = [
    *(
        case("sort.stable", operand, stable=True, dim=dim)
        for operand, dim in (
            (floats(5, 40), 1), (floats(7, 4, 3), 1), (_HOSTILE, 0), (_TIES, 1), (_ENDS, 1), (booleans(3, 9), 1),
            (_BYTES, 1), (floats(), 0), (floats(1), 0), (floats(2, 0), 1), (floats(0, 2), 1),
        )
    ),
    *(
        case("sort.stable", operand, stable=True, dim=0, descending=True)
        for operand in (floats(7, 4, 3), _HOSTILE, _TIES, _ENDS, booleans(9))
    ),
    *(case("sort.default", _shuffled(2, size), 1, True) for size in (1, 2, 257)),
    case("sort.stable", floats(2, 2500), stable=True),
    case("sort.stable", integers(1, 5000, low=-9, high=9), stable=True, dim=-1, descending=True),
    case("sort.stable", _shuffled(2, 9000), stable=False, descending=True, dim=-1),
    case("msort.default", floats(6, 3)),
    case("argsort.default", _FEW),
    case("argsort.default", _FEW, 0, True),
    case("argsort.stable", _TIES, stable=True, dim=1, descending=True),
]  # fmt: skip
TOP = [
    *(case("topk.default", _FEW, k, 1, largest) for k in (0, 1, 3, 30) for largest in (True, False)),
    case("topk.default", _FEW.through("aten.transpose.int", 0, 1), 2, 0),
    case("topk.default", _shuffled(200, 8), 2),
    case("topk.default", floats(), 1),
    case("topk.default", floats(0, 3), 2),
    *(case("topk.default", _shuffled(2, 9000), k) for k in (1, 50, 700)),
    case("topk.default", _shuffled(1, 5000, dtype=INT), 3, -1, False, False),
    case("topk.default", values(1.0, NAN, INF, -INF), 3),
    *(case("kthvalue.default", _FEW, k, 1) for k in (1, 7, 30)),
    case("kthvalue.default", _FEW, 2, 0, True),
    case("kthvalue.default", floats(), 1),
    *(
        case(f"{name}.dim", *args)
        for name in ("median", "nanmedian")
        for args in (
            (_FEW, 1), (_FEW, 0, True), (_shuffled(3, 9), 1), (values(3.0, NAN, 1.0, 2.0, NAN, 5.0), 0),
            (values(NAN, NAN), 0),
        )
    ),
    *(case(f"{name}.default", operand) for name in ("median", "nanmedian") for operand in (_FEW, floats())),
    *(case("mode.default", integers(6, 12, low=0, high=5), dim) for dim in (0, 1)),
    case("mode.default", values(2.0, 1.0, 2.0, 1.0, 3.0), -1, True),
]  # fmt: skip
_STEPS = values(-1.0, -0.5, -0.5, 0.0, 0.25, 1.0, 1.0)
_ROWS = Operand((2, 3), data=(0.0, 1.0, 2.0, -1.0, -1.0, 1.0))
SEARCHED = [
    *(
        case("searchsorted.Tensor", _STEPS, operand, right=right)
        for right in (False, True)
        for operand in (floats(3, 8), values(-0.5, 1.0, NAN, INF, -INF, 0.0, -0.0), floats(), floats(0))
    ),
    case("searchsorted.Tensor", _ROWS, floats(2, 9)),
    case("searchsorted.Tensor", _ROWS, floats(2, 9), out_int32=True, side="right"),
    case("searchsorted.Tensor", floats(0), floats(3)),
    case("searchsorted.Scalar", _STEPS, 0.25),
    case("searchsorted.Tensor", values(*range(0, 3000, 3), dtype=INT), integers(50, low=-5, high=3005)),
    refused("sorter", "searchsorted.Tensor", _STEPS, floats(3), sorter=integers(7, low=0, high=7)),
    case("bucketize.Tensor", floats(4, 5), _STEPS),
    case("bucketize.Tensor", integers(4, 5), values(-3, 0, 0, 4, dtype=INT), out_int32=True, right=True),
    case("bucketize.Scalar", 0.5, _STEPS),
]  # fmt: skip

CASES = [*SORTED, *TOP, *SEARCHED]
