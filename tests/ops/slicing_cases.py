"""Cases of elements in other places: reversed dimensions, diagonals, windows, pieces and joints, and index ranges."""

from __future__ import annotations

import torch

from tests.ops.cases import booleans, case, floats, integers
from tests.ops.indexing_cases import CUBE, MATRIX, TURNED

IMAGE, VECTOR = floats(2, 3, 6, 5), floats(5)

REVERSED = [
    case("flip.default", MATRIX, (0,)),
    case("flip.default", CUBE, (-1, 0)),
    case("flip.default", TURNED, (1,)),
    case("flip.default", integers(3, 4), ()),
    case("flip.default", floats(0, 4), (0, 1)),
    case("fliplr.default", MATRIX),
    case("flipud.default", booleans(4)),
    *(
        case("rot90.default", CUBE, turns, dims)
        for turns, dims in ((1, (0, 1)), (2, (1, 2)), (-1, (2, 0)), (4, (0, 1)))
    ),
]

DIAGONALS = [
    *(case("diagonal.default", MATRIX, offset) for offset in (0, 3, -1, 9)),
    case("diagonal.default", CUBE, 1, 1, 2),
    case("diagonal.default", TURNED, 0, 2, 0),
    case("diagonal_copy.default", MATRIX, 2),
    *(case("diag_embed.default", MATRIX, offset) for offset in (0, 2, -1)),
    case("diag_embed.default", MATRIX, 0, 0, 2),
    case("diag_embed.default", integers(2, 3), 1, -1, 0),
    case("diag.default", VECTOR),
    case("diag.default", VECTOR, -2),
    case("diag.default", MATRIX, 1),
    case("diagflat.default", CUBE, 1),
    case("trace.default", MATRIX),
    case("trace.default", integers(3, 3)),
    case("block_diag.default", [MATRIX, floats(2, 3), VECTOR]),
]

WINDOWS = [
    case("unfold.default", MATRIX, 1, 3, 2),
    case("unfold.default", CUBE, 1, 2, 1),
    case("unfold.default", TURNED, -1, 4, 3),
    case("unfold.default", integers(7), 0, 7, 1),
    case("unfold.default", floats(), 0, 1, 1),
    case("unfold_copy.default", MATRIX, 1, 3, 2),
    case("im2col.default", IMAGE, (3, 3), (1, 1), (1, 1), (1, 1)),
    case("im2col.default", IMAGE, (2, 3), (2, 1), (0, 2), (2, 1)),
    case("im2col.default", floats(3, 6, 5), (2, 2), (1, 1), (0, 0), (2, 2)),
    case("im2col.default", IMAGE.through("aten.permute.default", (0, 1, 3, 2)), (2, 2), (1, 1), (1, 0), (1, 1)),
    case("col2im.default", floats(2, 12, 20), (6, 5), (2, 2), (1, 1), (0, 0), (1, 1)),
    case("col2im.default", floats(2, 18, 30), (6, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    case("col2im.default", floats(2, 12, 6), (6, 5), (2, 3), (2, 1), (0, 1), (2, 2)),
    case("col2im.default", floats(12, 6), (6, 4), (2, 2), (1, 1), (0, 0), (2, 2)),
    case("col2im.default", floats(1, 8, 6), (7, 5), (2, 2), (1, 1), (0, 0), (2, 2)),
    case("col2im.default", floats(1, 36, 4), (7, 7), (6, 6), (1, 1), (0, 0), (1, 1)),
]

PIECES = [
    case("tensor_split.sections", MATRIX, 3, 1),
    case("tensor_split.sections", VECTOR, 7),
    case("tensor_split.indices", MATRIX, (1, 5, -1), 1),
    case("tensor_split.indices", VECTOR, (3, 2, 9)),
    case("hsplit.int", MATRIX, 2),
    case("hsplit.array", VECTOR, (1, 4)),
    case("vsplit.int", MATRIX, 3),
    case("vsplit.array", MATRIX, (1,)),
    case("dsplit.int", CUBE, 2),
    case("dsplit.array", CUBE, (3,)),
    case("split.sizes", MATRIX, (1, 2), 0),
    case("split_copy.Tensor", MATRIX, 3, 1),
    case("unsafe_split.Tensor", MATRIX, 3, 1),
    case("split_with_sizes_copy.default", MATRIX, (5, 3), 1),
    case("unsafe_chunk.default", MATRIX, 3, 1),
    case("unbind_copy.int", CUBE, 1),
    case("narrow_copy.default", MATRIX, 1, 2, 3),
    *(case(f"atleast_{rank}d.default", x) for rank in (1, 2, 3) for x in (floats(), VECTOR, MATRIX)),
    case("ravel.default", TURNED),
]

JOINTS = [
    case("hstack.default", [VECTOR, floats(2)]),
    case("hstack.default", [MATRIX, floats(3, 1)]),
    case("vstack.default", [VECTOR, floats(2, 5)]),
    case("dstack.default", [MATRIX, MATRIX]),
    case("column_stack.default", [floats(3), MATRIX]),
    case("meshgrid.default", [floats(3), floats(2)]),
    case("meshgrid.indexing", [integers(3), integers(2), integers()], indexing="ij"),
    case("meshgrid.indexing", [floats(3), floats(2), floats(4)], indexing="xy"),
    case("cartesian_prod.default", [floats(3), floats(2)]),
    case("cartesian_prod.default", [floats(3)]),
]

RANGES = [
    case("eye.default", 4),
    case("eye.m", 3, 5, dtype=torch.int64),
    case("linspace.default", 0, 1, 5),
    case("linspace.default", -2.5, 7, 8, dtype=torch.float32),
    case("linspace.default", 3, 1, 1),
    case("logspace.default", 0.0, 1, 5),
    case("logspace.default", 0.0, 3, 4, 2.0),
    case("tril_indices.default", 4, 3, 1),
    case("tril_indices.default", 3, 5, -1, dtype=torch.int32),
    case("triu_indices.default", 4, 3, -2),
    case("triu_indices.default", 3, 5, 1),
    case("triu_indices.default", 2, 2, 3),
]

CASES = [*REVERSED, *DIAGONALS, *WINDOWS, *PIECES, *JOINTS, *RANGES]
