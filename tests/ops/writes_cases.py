"""Cases of ops that put other elements into a tensor, and of the views that name the places."""

from __future__ import annotations

from tests.ops.cases import booleans, case, floats, integers

MATRIX, CUBE, IMAGE = floats(3, 8), floats(2, 3, 4), floats(2, 3, 4, 5)
TURNED = floats(4, 3, 2).through("aten.permute.default", (2, 1, 0))
WHOLE = integers(3, 8)

ASSIGNED = [
    case("copy.default", CUBE, floats(4)),
    case("copy.default", TURNED, floats(3, 1)),
    case("copy.default", WHOLE, floats(8)),
    case("copy.default", MATRIX, integers(8)),
    case("copy.default", booleans(3, 8), WHOLE),
    case("copy_.default", MATRIX, floats(3, 8)),
    case("fill.Scalar", CUBE, 1.5),
    case("fill.Scalar", WHOLE, -3),
    case("fill.Tensor", CUBE, floats()),
    case("fill.Tensor", WHOLE, integers()),
    case("fill_.Scalar", booleans(4), True),
    case("zero.default", CUBE),
    case("zero_.default", WHOLE),
]

RUNS = [
    *(
        case("slice_scatter.default", operand, floats(2, n, 4), 1, *taken)
        for operand in (CUBE, TURNED)
        for n, taken in ((2, (1,)), (1, (1, 2)), (2, (-3, -1)), (3, ()), (0, (2, 1)))
        if operand is CUBE or n != 0
    ),
    case("slice_scatter.default", TURNED, floats(2, 3, 2), 2, 1, 3),
    case("slice_scatter.default", MATRIX, floats(3, 4), 1, 0, None, 2),
    case("slice_scatter.default", MATRIX, floats(3, 4), 1, 1, None, 2),
    case("slice_scatter.default", MATRIX, floats(3, 2), 1, 3, 8, 3),
    case("slice_scatter.default", MATRIX, floats(3, 3), 1, 0, 7, 3),
    case("slice_scatter.default", floats(7, 5), floats(2, 5), 0, 2, None, 4),
    case("slice_scatter.default", floats(7, 5), floats(2, 5), -2, 1, 5, 2),
    case("slice_scatter.default", TURNED, floats(2, 3, 2), 2, 1, None, 2),
    case("slice_scatter.default", WHOLE, integers(3, 3), 1, 1, 7, 2),
    case("slice_scatter.default", booleans(3, 8), booleans(3, 3), 1, 2, 5),
    case("slice_scatter.default", WHOLE, floats(3, 2), 1, 2, 4),
    case("slice_scatter.default", floats(0, 4), floats(0, 2), 1, 1, 3),
    case("slice_scatter.default", IMAGE, floats(2, 3, 2, 5), 2, 1, 3),
    case("slice_scatter.default", IMAGE, floats(2, 3, 4, 3), 3, 0, None, 2),
]

POSITIONS = [
    *(case("select_scatter.default", operand, floats(2, 4), 1, 2) for operand in (CUBE, TURNED)),
    case("select_scatter.default", CUBE, floats(2, 3), -1, -2),
    case("select_scatter.default", floats(5), floats(), 0, 3),
    case("select_scatter.default", WHOLE, integers(8), 0, -1),
    case("select_scatter.default", IMAGE, floats(2, 4, 5), 1, 0),
    case("select_scatter.default", MATRIX, integers(3), 1, 7),
]

DIAGONALS = [
    *(case("diagonal.default", MATRIX, offset) for offset in (0, 3, -1, -3, 9)),
    case("diagonal.default", CUBE, 0, 0, 2),
    case("diagonal.default", TURNED, 1, 1, 2),
    case("diagonal.default", IMAGE, -1, -1, 1),
    case("diagonal.default", WHOLE),
    *(case("diagonal_scatter.default", MATRIX, floats(n), offset) for n, offset in ((3, 0), (3, 5), (2, 6), (2, -1))),
    case("diagonal_scatter.default", floats(8, 3), floats(3), -4),
    case("diagonal_scatter.default", CUBE, floats(3, 2), 1, 0, 2),
    case("diagonal_scatter.default", IMAGE, floats(2, 5, 2), 1, -2, 1),
    case("diagonal_scatter.default", WHOLE, integers(3)),
    case("diagonal_scatter.default", MATRIX, floats(0), 9),
]

STRIDED = [
    case("as_strided.default", MATRIX, (3, 4), (8, 2)),
    case("as_strided.default", MATRIX, (2, 3, 2), (1, 2, 5), 3),
    case("as_strided.default", floats(16), (7, 4), (2, 1)),
    case("as_strided.default", WHOLE, (2, 2), (0, 1), 20),
    case("as_strided.default", MATRIX, (), (), 5),
    case("as_strided.default", MATRIX, (0, 4), (1, 1)),
    case("as_strided_scatter.default", MATRIX, floats(3, 4), (3, 4), (8, 2)),
    case("as_strided_scatter.default", MATRIX, floats(4, 3), (4, 3), (2, 8), 1),
    case("as_strided_scatter.default", MATRIX, floats(2, 3), (2, 3), (1, 5), 3),
    case("as_strided_scatter.default", WHOLE, integers(5), (5,), (3,), 2),
    case("as_strided_scatter.default", MATRIX, floats(), (), (), 5),
    case("as_strided_scatter.default", MATRIX, floats(1, 3, 1), (1, 3, 1), (9, 1, 4), 5),
]

ORDERS = [
    case("swapdims.default", CUBE, 0, -1),
    case("mT.default", CUBE),
    case("mH.default", MATRIX),
    case("adjoint.default", CUBE),
    case("transpose_.default", CUBE, 0, 1),
    case("squeeze_.dim", floats(2, 1, 3), 1),
]

CASES = [*ASSIGNED, *RUNS, *POSITIONS, *DIAGONALS, *STRIDED, *ORDERS]
