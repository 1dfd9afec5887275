"""Cases of how mixtures of experts find tokens; their products are in tests of experts."""

from __future__ import annotations

from tests.ops.cases import case, floats, integers

CASES = [
    case("floor_divide.default", integers(40), integers(40, low=1, high=5)),
    case("floor_divide.default", integers(40), integers(40, low=-4, high=0)),
    case("floor_divide.Scalar", integers(40), 3),
    case("floor_divide.Scalar", integers(40), -1),
    case("floor_divide.default", floats(40), floats(40, low=0.5, high=2.0)),
]
