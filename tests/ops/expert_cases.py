"""Cases of what mixtures of experts count with; their products are in tests of experts."""

from __future__ import annotations

from tests.ops.cases import case, floats, integers, refused, values

CASES = [
    case("histc.default", values(0, 1, 1, 3, 7, -1, 8), bins=8, min=0, max=7),
    case("histc.default", floats(300), bins=5, min=-1, max=1.5),
    refused("a range that is not empty", "histc.default", floats(8), bins=4),
    case("floor_divide.default", integers(40), integers(40, low=1, high=5)),
    case("floor_divide.default", integers(40), integers(40, low=-4, high=0)),
    case("floor_divide.Scalar", integers(40), 3),
    case("floor_divide.Scalar", integers(40), -1),
    case("floor_divide.default", floats(40), floats(40, low=0.5, high=2.0)),
    refused("expected another number", "floor_divide.Scalar", integers(4), 0),
]
