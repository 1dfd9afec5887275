"""Cases of ops that choose elements, join tensors, or make tensors out of none."""

from __future__ import annotations

import torch

from tests.ops.cases import Operand, booleans, case, floats, integers

INF = float("inf")
MATRIX, CUBE = floats(3, 8), floats(2, 3, 4)
TURNED = floats(4, 3, 2).through("aten.permute.default", (2, 1, 0))
NOTHING = floats(0)


def indices(*shape: int, below: int, dtype: str = "int64") -> Operand:
    return integers(*shape, low=0, high=below, dtype=dtype)


JOINS = [
    case("cat.default", [MATRIX, floats(2, 8)]),
    case("cat.default", [floats(3, 1), floats(3, 2), floats(3, 3)], 1),
    case("cat.default", [CUBE, TURNED, floats(2, 3, 1)], -1),
    case("cat.default", [CUBE, TURNED], 1),
    case("concatenate.default", [floats(3, 1), floats(3, 2)], 1),
    case("cat.default", [MATRIX]),
    case("cat.default", [NOTHING, MATRIX, NOTHING]),
    case("cat.default", [NOTHING, NOTHING]),
    case("cat.default", [floats(3, 0), floats(3, 2)], 1),
    case("cat.default", [integers(4), integers(3)]),
    case("cat.default", [integers(4), floats(3)]),
    case("cat.default", [booleans(4), booleans(3)]),
    case("cat.default", [floats(2, 1, 3).through("aten.expand.default", (2, 4, 3)), floats(2, 4, 3)], 2),
    case("concat.default", [MATRIX, MATRIX], 1),
    case("stack.default", [MATRIX, floats(3, 8), floats(3, 8)]),
    case("stack.default", [CUBE, TURNED], -1),
    case("stack.default", [floats(), floats()]),
]

LOOKUPS = [
    case("embedding.default", floats(11, 6), indices(4, below=11)),
    case("embedding.default", floats(11, 6), indices(2, 5, below=11)),
    case("embedding.default", floats(11, 6), indices(below=11)),
    case("embedding.default", floats(11, 6), indices(4, below=11, dtype="int32")),
    case("embedding.default", floats(11, 6), indices(4, below=11), 3),
    case("embedding.default", floats(6, 11).through("aten.transpose.int", 0, 1), indices(4, below=11)),
    case("embedding.default", floats(11, 6), indices(0, below=11)),
    case("index_select.default", CUBE, 1, indices(5, below=3)),
    case("index_select.default", TURNED, -1, indices(5, below=4)),
    case("index_select.default", integers(4, 6), 0, indices(3, below=4)),
    case("index_select.default", floats(9), 0, indices(3, below=9).through("aten.slice.Tensor", 0, 1)),
]

_ROWS = integers(5, low=-3, high=3)
SELECTIONS = [
    case("index.Tensor", MATRIX, [_ROWS]),
    case("index.Tensor", MATRIX, [integers(2, 3, low=-3, high=3, dtype="int32")]),
    case("index.Tensor", MATRIX, [_ROWS, integers(5, low=-8, high=8)]),
    case("index.Tensor", CUBE, [indices(2, 1, below=2), indices(3, below=3)]),
    case("index.Tensor", TURNED, [indices(below=2), indices(4, below=3), indices(2, 1, below=4)]),
    case("index.Tensor", booleans(2, 7), [indices(1, 1, 1, 1, below=2), indices(1, 1, 1, 7, below=7)]),
    case("index.Tensor", integers(4, 6), [integers(3, low=-4, high=4)]),
    case("index.Tensor", MATRIX, [indices(0, below=3)]),
    case("gather.default", MATRIX, 1, indices(3, 5, below=8)),
    case("gather.default", MATRIX, 0, indices(4, 8, below=3)),
    case("gather.default", MATRIX, -1, indices(2, 9, below=8)),
    case("gather.default", CUBE, 1, indices(2, 5, 3, below=3)),
    case("gather.default", TURNED, 2, indices(1, 3, 6, below=4)),
    case("gather.default", integers(1, 9).through("aten.expand.default", (3, 9)), 1, indices(3, 4, below=9)),
    case("gather.default", booleans(9), 0, indices(4, below=9)),
    case("gather.default", floats(), 0, indices(below=1)),
    case("gather.default", MATRIX, 1, indices(0, 8, below=8)),
    case("gather.default", MATRIX, 1, indices(3, 2, below=8), sparse_grad=True),
]

_CACHE, _ENDS = floats(2, 6, 4), Operand((2,), "int64", data=(0, 5))
COPIES = [
    case("index_copy.default", _CACHE, 1, Operand((2,), "int64", data=(4, 1)), floats(2, 2, 4)),
    case("index_copy.default", _CACHE, -1, Operand((1,), "int64", data=(3,)), floats(2, 6, 1)),
    case("index_copy.default", _CACHE, 0, Operand((), "int64", data=(1,)), floats(1, 6, 4)),
    case("index_copy.default", integers(5, 3), 0, Operand((2,), "int64", data=(0, 4)), integers(2, 3)),
    case("index_copy.default", _CACHE, 1, _ENDS, floats(2, 4, 2).through("aten.transpose.int", 1, 2)),
]

TRIANGLES = [
    *(case(f"{name}.default", floats(5, 7), diagonal) for name in ("tril", "triu") for diagonal in (0, -2, 3)),
    *(case(f"{name}.default", floats(2, 4, 4)) for name in ("tril", "triu")),
    *(case(f"{name}.default", booleans(5, 5), 1) for name in ("tril", "triu")),
    *(case(f"{name}.default", integers(5, 5)) for name in ("tril", "triu")),
    case("triu.default", Operand((4, 4), data=(-INF,) * 16), 1),
]

PADDING = [
    case("constant_pad_nd.default", MATRIX, (1, 2)),
    case("constant_pad_nd.default", CUBE, (1, 0, 2, 3), 1.5),
    case("constant_pad_nd.default", TURNED, (0, 1, 0, 0, 1, 0), -1.0),
    case("constant_pad_nd.default", MATRIX, (-1, -2)),
    case("constant_pad_nd.default", MATRIX, (-1, 2, 1, -1)),
    case("constant_pad_nd.default", MATRIX, ()),
    case("constant_pad_nd.default", integers(3, 4), (1, 1), 7),
    case("constant_pad_nd.default", booleans(3, 4), (1, 1)),
    case("pad.default", MATRIX, (1, 2)),
    case("pad.default", MATRIX, (1, 2), "constant", 3.0),
    case("pad.default", MATRIX, (1, 2), "reflect"),
]

CREATION = [
    case("full.default", (2, 3), 1.5),
    case("full.default", (2, 3), -INF),
    case("full.default", (), 7),
    case("full.default", (3,), True),
    case("full.default", (3,), 2, dtype=torch.float32),
    case("full.default", (0, 3), 2.0),
    case("zeros.default", (2, 3)),
    case("zeros.default", (4,), dtype=torch.int64),
    case("ones.default", (2, 3)),
    case("ones.default", (4,), dtype=torch.bool),
    case("full_like.default", MATRIX, 2.5),
    case("full_like.default", integers(4), 3),
    case("full_like.default", MATRIX, 3, dtype=torch.int64),
    case("zeros_like.default", TURNED),
    case("ones_like.default", booleans(4)),
    case("ones_like.default", integers(4), dtype=torch.float32),
    case("new_full.default", MATRIX, (2, 2), 2.5),
    case("new_full.default", integers(4), (3,), -INF, dtype=torch.float32),
    case("new_zeros.default", integers(4), (2, 3)),
    case("new_zeros.default", MATRIX, (0, 3)),
    case("new_ones.default", integers(4), (), dtype=torch.bool, pin_memory=False),
    case("new_ones.default", MATRIX, (5,)),
    case("scalar_tensor.default", 2.5),
    case("scalar_tensor.default", 3, dtype=torch.int64),
    case("arange.default", 7),
    case("arange.default", 0),
    case("arange.default", 5.0),
    case("arange.start", 3, 9),
    case("arange.start", -2.5, 2.0, dtype=torch.float32),
    case("arange.start_step", 1, 10, 3),
    case("arange.start_step", 5, -3, -2),
    case("arange.start_step", 0.0, 1.0, 0.25),
    case("arange.start_step", 7.5, -2.5, -1.5, dtype=torch.int64),
    case("arange.start_step", 0, 6, 2, dtype=torch.float32),
]


DIFFERENCES = [
    case("diff.default", MATRIX),
    case("diff.default", CUBE, 2, 1),
    case("diff.default", MATRIX, 1, 1, floats(3, 2)),
    case("diff.default", TURNED, 1, 0, None, floats(1, 3, 4)),
    case("diff.default", integers(3, 4), 2, 0, integers(1, 4), integers(2, 4)),
    case("diff.default", booleans(9)),
    case("diff.default", floats(3), 3),
]
CASES = [*JOINS, *DIFFERENCES, *LOOKUPS, *SELECTIONS, *COPIES, *TRIANGLES, *PADDING, *CREATION]
