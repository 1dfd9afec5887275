"""Cases of writes by index: values that replace elements, and values that are combined with them."""

from __future__ import annotations

from tests.ops.cases import Operand, booleans, case, floats, integers, refused
from tests.ops.indexing_cases import CUBE, MATRIX, TURNED, indices

KERNELS = ("metal", "cuda")  # those with a kernel for rows that are combined


def _named(*numbers: int, shape: tuple[int, ...] | None = None, dtype: str = "int64") -> Operand:
    return Operand(shape or (len(numbers),), dtype, data=numbers)


_ORDER = _named(2, 0, 1)
_ROWS = indices(7, below=3)
_WIDE = _named(0, 2, 1, 0, shape=(4, 1)).through("aten.expand.default", (4, 8))

REPLACED = [
    case("scatter.src", floats(3, 5), 0, _named(0, 1, 2, 1, 2, 0, shape=(2, 3)), floats(2, 3)),
    case("scatter.src", floats(3, 5), 1, _named(4, 0, 3, 1, shape=(2, 2)), floats(3, 3)),
    case("scatter.src", floats(2, 3, 4), -1, _named(*[3, 1] * 6, shape=(2, 3, 2)), floats(2, 3, 2)),
    case("scatter.src", TURNED, 1, _ORDER.through("aten.reshape.default", (1, 3, 1)), floats(1, 3, 1)),
    case("scatter.src", integers(4), 0, _named(3, 0), integers(2)),
    case("scatter.src", booleans(4), 0, _named(3, 0), booleans(2)),
    case("scatter.src", floats(), 0, _named(0, shape=()), floats()),
    case("scatter.src", MATRIX, 0, indices(0, 8, below=3), floats(0, 8)),
    case("scatter.value", MATRIX, 1, indices(3, 4, below=8), 1.5),
    case("scatter.value", integers(2, 9), 1, indices(2, 1, below=9), 7),
    case("index_fill.int_Scalar", MATRIX, 1, _named(-1, 0, 3), 2.5),
    case("index_fill.int_Scalar", integers(4, 3), 0, _named(1), 3),
    case("index_fill.int_Scalar", MATRIX, 0, indices(0, below=3), 2.5),
    case("index_fill.int_Tensor", CUBE, -2, _named(2, 0), floats()),
    case("index_put.default", MATRIX, [_ORDER], floats(3, 8)),
    case("index_put.default", MATRIX, [_named(-1, 0)], floats(8)),
    case("index_put.default", MATRIX, [None, _named(6, 1, -1)], floats(3, 3)),
    case("index_put.default", MATRIX, [_ORDER, _named(6, 1, -1)], floats(3)),
    case("index_put.default", MATRIX, [_ORDER, _named(6, 1, -1)], floats()),
    case("index_put.default", CUBE, [_named(0, 1), None, _named(3, 1)], floats(2, 3)),
    case("index_put.default", CUBE, [_named(0, 1, shape=(2, 1)), None, _named(3, 1)], floats(3)),
    case("index_put.default", CUBE, [None, _named(0, 2, shape=(2, 1)), _named(3, 1)], floats(2, 2, 2)),
    case("index_put.default", TURNED, [_named(1, 0)], floats(2, 3, 4)),
    case("index_put.default", integers(5), [_named(3, 1)], integers(2)),
    case("index_put.default", MATRIX, [booleans(3, 8)], floats()),
    case("index_put.default", MATRIX, [booleans(3)], floats(8)),
    case("index_put.default", MATRIX, [None, booleans(8)], floats(3, 1)),
    case("index_put.default", CUBE, [booleans(2, 3)], floats(1, 4), True),
    case("index_put.default", MATRIX, [indices(0, below=3)], floats(0, 8)),
    refused("expected one value for all of them", "index_put.default", MATRIX, [booleans(3)], floats(3, 8)),
    case("put.default", MATRIX, _named(-1, 0, 13), floats(3)),
    case("put.default", integers(4, 3), _named(1, 7, shape=(2, 1)), integers(2)),
    case("masked_scatter.default", MATRIX, booleans(3, 8), floats(24)),
    case("masked_scatter.default", CUBE, booleans(2, 3, 1), floats(6, 4)),
    case("masked_scatter.default", CUBE, booleans(4), floats(24)),
    case("masked_scatter.default", integers(5), booleans(5), integers(5)),
    case("masked_scatter.default", MATRIX, Operand((3, 8), "bool", data=(0,) * 24), floats(0)),
    case("masked_scatter.default", floats(70, 70), booleans(70, 70), floats(4900)),
]

COMBINED = [
    case("index_add.default", MATRIX, 0, _ROWS, floats(7, 8)).only_on(*KERNELS),
    case("index_add.default", MATRIX, 0, _ROWS, floats(7, 8), alpha=-2).storing(2).only_on(*KERNELS),
    case("index_add.default", MATRIX, 1, indices(9, below=8, dtype="int32"), floats(3, 9)).only_on(*KERNELS),
    case("index_add.default", CUBE, 1, indices(5, below=3), floats(2, 5, 4)).only_on(*KERNELS),
    case("index_add.default", TURNED, 2, indices(5, below=4), floats(2, 3, 5)).only_on(*KERNELS),
    case("index_add.default", floats(40, 3), 0, indices(2000, below=40), floats(2000, 3)).only_on(*KERNELS),
    case("index_add.default", floats(5, 24), 0, indices(9000, below=5), floats(9000, 24, low=0.0, high=0.01)).only_on(
        *KERNELS
    ),
    case("index_add.default", floats(2, 700), 0, indices(6, below=2), floats(6, 700)).only_on(*KERNELS),
    case("index_add.default", floats(6), 0, indices(9, below=6), floats(9)).only_on(*KERNELS),
    case("index_add.default", floats(), 0, _named(0, shape=()), floats()).only_on(*KERNELS),
    case("index_add.default", integers(4, 3), 0, indices(6, below=4), integers(6, 3)),
    case("index_add.default", integers(4, low=-(2**40), high=2**40), 0, indices(6, below=4), integers(6)),
    case("index_add.default", MATRIX, 0, indices(0, below=3), floats(0, 8)),
    case("scatter_add.default", MATRIX, 0, _WIDE, floats(4, 8)).only_on(*KERNELS),
    case("scatter_add.default", MATRIX, 0, _WIDE, floats(6, 9)).only_on(*KERNELS),
    case("scatter_add.default", floats(5, 9), 0, _WIDE, floats(4, 8)).only_on(*KERNELS),
    case("scatter_add.default", MATRIX, 1, indices(3, 9, below=8), floats(3, 9)),
    case("scatter_add.default", floats(4, 8), 1, indices(3, 5, below=8), floats(3, 5)),
    case("scatter_add.default", TURNED, 1, indices(2, 5, 4, below=3), floats(2, 5, 4)),
    case("scatter_add.default", integers(4, 6), 1, indices(4, 9, below=6), integers(4, 9)),
    case("scatter_add.default", integers(5, dtype="int32"), 0, indices(9, below=5), integers(9, dtype="int32")),
    case("scatter_add.default", MATRIX, 1, indices(3, 0, below=8), floats(3, 0)),
    case("scatter.reduce", MATRIX, 0, indices(2, 8, below=3), floats(2, 8), reduce="add"),
    case("scatter.reduce", MATRIX, 0, _WIDE, floats(4, 8), reduce="multiply").only_on(*KERNELS),
    case("scatter.value_reduce", MATRIX, 1, indices(3, 5, below=8), 2.0, reduce="multiply"),
    case("scatter.value_reduce", integers(2, 5), 1, indices(2, 7, below=5), 3, reduce="add"),
    *(
        case("scatter_reduce.two", MATRIX, 1, indices(3, 9, below=8), floats(3, 9), how, include_self=own)
        for how in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    *(
        case("index_reduce.default", MATRIX, 0, _named(2, 0, 2, 2), floats(4, 8), how, include_self=own).only_on(
            *KERNELS
        )
        for how in ("prod", "mean", "amax", "amin")
        for own in (True, False)
    ),
    case("scatter_reduce.two", MATRIX, 0, _WIDE, floats(4, 8), "mean", include_self=False).only_on(*KERNELS),
    case("scatter_reduce.two", integers(4), 0, indices(6, below=4), integers(6), "amax", include_self=False),
    refused("mean of int64", "scatter_reduce.two", integers(4), 0, indices(6, below=4), integers(6), "mean"),
    case("index_put.default", MATRIX, [_ROWS], floats(7, 8), True).only_on(*KERNELS),
    case("index_put.default", MATRIX, [None, indices(9, below=8)], floats(3, 9), True).only_on(*KERNELS),
    case("index_put.default", MATRIX, [_ROWS, indices(7, below=8)], floats(7), True).only_on(*KERNELS),
    case("index_put.default", CUBE, [indices(6, below=2), None, indices(6, below=4)], floats(6, 3), True).only_on(
        *KERNELS
    ),
    case("index_put.default", integers(4, 3), [indices(6, below=4)], integers(6, 3), True),
    case("put.default", MATRIX, indices(9, below=24), floats(9), True).only_on(*KERNELS),
]

CASES = [*REPLACED, *COMBINED]
