"""Cases of ops that reorder or reshape; an elementwise op or a copy after them makes kernels read their strides."""

from __future__ import annotations

import torch

from tests.ops.cases import Case, booleans, case, floats, integers, refused

CUBE, IMAGE = floats(2, 3, 4), floats(2, 3, 4, 5)
TURNED = floats(4, 3, 2).through("aten.permute.default", (2, 1, 0))
EXPANDED = floats(3, 1).through("aten.expand.default", (2, 3, 4))
SLICED = floats(2, 3, 9).through("aten.slice.Tensor", 2, 1, None, 2)


def _every_form(op: str, *attrs: object) -> list[Case]:
    """The op on operands [2, 3, 4] whose strides differ."""
    return [case(op, operand, *attrs) for operand in (CUBE, TURNED, EXPANDED, SLICED)]


IDENTITIES = [
    *(case(f"{name}.default", TURNED) for name in ("alias", "detach", "contiguous", "clone")),
    *(case(f"{name}.default", floats(4)) for name in ("lift_fresh", "lift_fresh_copy")),
    case("contiguous.default", IMAGE, memory_format=torch.channels_last),
    case("clone.default", EXPANDED, memory_format=torch.contiguous_format),
    case("clone.default", floats()),
    case("alias.default", floats(0, 3)),
]

ORDERS = [
    *_every_form("transpose.int", 0, 1),
    *_every_form("transpose.int", -1, -3),
    case("transpose.int", floats(), 0, -1),
    case("transpose.int", integers(3, 4), 0, 1),
    case("transpose.int", booleans(3, 4), 0, 1),
    case("swapaxes.default", CUBE, 0, 2),
    case("t.default", floats(3, 4)),
    case("t.default", floats(3)),
    case("t.default", floats()),
    case("numpy_T.default", floats(3, 4)),
    refused("given 3 dimensions", "numpy_T.default", CUBE),
    *_every_form("permute.default", (1, 2, 0)),
    case("permute.default", IMAGE, (0, -2, -1, 1)),
    case("permute.default", floats(0, 3), (1, 0)),
    case("permute.default", floats(2, 1, 2, 1, 3, 1), (5, 4, 3, 2, 1, 0)),
    case("movedim.int", IMAGE, 1, -1),
    case("movedim.int", IMAGE, -1, 0),
]

SHAPES = [
    *_every_form("reshape.default", (6, 4)),
    *_every_form("reshape.default", (4, -1)),
    case("reshape.default", floats(1), ()),
    case("reshape.default", floats(), (1, 1)),
    case("reshape.default", floats(0, 4), (2, 0, 3)),
    case("reshape.default", floats(1, 6, 1), (2, 1, 3)),
    case("view.default", IMAGE, (2, 12, 5)),
    case("view.default", IMAGE, (2, 3, -1)),
    case("_unsafe_view.default", IMAGE, (6, 20)),
    case("view_as.default", CUBE, floats(6, 4)),
    case("reshape_as.default", TURNED, floats(24)),
    *_every_form("flatten.using_ints", 1),
    case("flatten.using_ints", IMAGE),
    case("flatten.using_ints", IMAGE, 0, -3),
    case("flatten.using_ints", floats()),
    case("unflatten.int", floats(6, 4), 0, (2, -1)),
    case("unflatten.int", floats(2, 12), -1, (3, 2, 2)),
    *_every_form("unsqueeze.default", 1),
    case("unsqueeze.default", CUBE, -1),
    case("unsqueeze.default", floats(), 0),
    case("squeeze.default", floats(1, 3, 1, 4)),
    case("squeeze.default", floats(1, 1)),
    case("squeeze.dim", floats(1, 3, 1, 4), -2),
    case("squeeze.dim", floats(1, 3, 1, 4), 1),
    case("squeeze.dims", floats(1, 3, 1, 4), (0, 2)),
    case("squeeze.dims", floats(1, 3, 1, 4), (1, 2)),
]

REPEATS = [
    case("expand.default", floats(3, 1), (3, 4)),
    case("expand.default", floats(3, 1), (2, -1, 4)),
    case("expand.default", floats(), (2, 3)),
    case("expand.default", floats(1, 3), (0, 3)),
    case("expand.default", floats(3, 4), (3, 4)),
    case("expand.default", TURNED.through("aten.slice.Tensor", 1, 0, 1), (2, 3, 4)),
    case("expand_as.default", floats(3, 1), CUBE),
    case("broadcast_to.default", floats(4), (2, 3, 4)),
]

PARTS = [
    *_every_form("slice.Tensor", 2, 1, 3),
    *_every_form("slice.Tensor", 1, -2),
    case("slice.Tensor", CUBE),
    case("slice.Tensor", CUBE, 2, 0, 9223372036854775807, 2),
    case("slice.Tensor", CUBE, -1, -3, -1),
    case("slice.Tensor", CUBE, 1, 2, 1),
    case("slice.Tensor", CUBE, 0, 5, 9),
    case("slice.Tensor", integers(5, 4), 0, 1, 5, 3),
    case("narrow.default", CUBE, 1, 1, 2),
    case("narrow.default", CUBE, 2, -2, 1),
    *_every_form("select.int", 1, 2),
    case("select.int", CUBE, -1, -1),
    case("select.int", floats(3), 0, 1),
    *(case("split.Tensor", operand, 2, 1) for operand in (CUBE, TURNED)),
    case("split.Tensor", floats(7), 3),
    case("split_with_sizes.default", IMAGE, (1, 2), 1),
    case("split_with_sizes.default", floats(6), (1, 0, 5)),
    case("chunk.default", floats(2, 7), 3, -1),
    case("chunk.default", floats(2, 2), 4),
    case("unbind.int", CUBE),
    case("unbind.int", TURNED, -1),
]

CASES = [*IDENTITIES, *ORDERS, *SHAPES, *REPEATS, *PARTS]
