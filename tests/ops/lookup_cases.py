"""Cases of elements that integer tensors choose, beyond plain indexing, and of samples of images."""

from __future__ import annotations

from tests.ops.cases import Operand, case, floats, integers
from tests.ops.indexing_cases import CUBE, MATRIX, TURNED, indices


def _named(*numbers: int, shape: tuple[int, ...] | None = None, dtype: str = "int64") -> Operand:
    return Operand(shape or (len(numbers),), dtype, data=numbers)


MIXED = [
    case("index.Tensor", MATRIX, [None, integers(5, low=-8, high=8)]),
    case("index.Tensor", CUBE, [None, indices(2, 5, below=3)]),
    case("index.Tensor", CUBE, [None, None, indices(below=4)]),
    case("index.Tensor", CUBE, [None, indices(2, 1, below=3), indices(5, below=4)]),
    case("index.Tensor", CUBE, [indices(5, below=2), None, indices(5, below=4)]),
    case("index.Tensor", TURNED, [indices(2, 1, below=2), None, indices(3, below=4)]),
    case("index.Tensor", floats(2, 3, 4, 5), [None, indices(6, below=3), None, indices(6, below=5)]),
    case("index.Tensor", floats(2, 3, 4, 5), [None, indices(6, below=3), indices(6, below=4)]),
    case("index.Tensor", integers(4, 6), [None, indices(0, below=6)]),
]

LOOKUPS = [
    case("take.default", MATRIX, integers(2, 5, low=-24, high=24)),
    case("take.default", TURNED, indices(below=24)),
    case("take_along_dim.default", MATRIX, indices(3, 5, below=8), 1),
    case("take_along_dim.default", MATRIX, indices(1, 5, below=8), 1),
    case("take_along_dim.default", floats(1, 3, 4), indices(2, 5, 4, below=3), 1),
    case("take_along_dim.default", MATRIX, indices(7, below=24)),
    case("one_hot.default", indices(2, 3, below=5), 5),
    case("repeat_interleave.self_int", MATRIX, 3, 1),
    case("repeat_interleave.self_int", CUBE, 2, 0),
    case("repeat_interleave.self_int", TURNED, 2),
    case("repeat_interleave.Tensor", _named(2, 0, 3, 1), output_size=6),
    case("repeat_interleave.self_Tensor", MATRIX, _named(2, 0, 3), 0, output_size=5),
    case("repeat_interleave.self_Tensor", floats(3), _named(2), output_size=6),
]

_IMAGE, _GRID = floats(2, 3, 5, 4), floats(2, 6, 7, 2, low=-1.3, high=1.3)
_VOLUME, _PLACES = floats(1, 2, 3, 4, 5), floats(1, 2, 3, 4, 3, low=-1.3, high=1.3)
SAMPLES = [
    *(
        case("grid_sampler.default", _IMAGE, _GRID, mode, padding, corners)
        for mode in (0, 1, 2)
        for padding in (0, 1, 2)
        for corners in (False, True)
    ),
    *(
        case("grid_sampler.default", _VOLUME, _PLACES, mode, padding, padding == 1)
        for mode in (0, 1)
        for padding in range(3)
    ),
    case("grid_sampler_2d.default", _IMAGE, _GRID, 0, 0, False),
    case("grid_sampler_3d.default", _VOLUME, _PLACES, 0, 0, False),
    case("grid_sampler.default", floats(1, 1, 1, 1), floats(1, 2, 2, 2), 0, 2, True),
    *(case("affine_grid_generator.default", floats(2, 2, 3), (2, 3, 5, 4), corners) for corners in (False, True)),
    *(case("affine_grid_generator.default", floats(1, 3, 4), (1, 3, 2, 5, 4), corners) for corners in (False, True)),
    case("affine_grid_generator.default", floats(2, 2, 3), (2, 3, 1, 4), True),
]

CASES = [*MIXED, *LOOKUPS, *SAMPLES]
