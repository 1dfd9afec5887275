"""Cases of attention with its projections."""

from __future__ import annotations

from tests.ops.cases import Operand, case, floats, refused

_NAME = "_native_multi_head_attention.default"
_TEXT, _OTHER = floats(2, 5, 16), floats(2, 5, 16)
_WEIGHTS = [
    floats(48, 16, low=-0.5, high=0.5), floats(48, low=-0.5, high=0.5), floats(16, 16, low=-0.5, high=0.5), floats(16),
]  # fmt: skip
_CLOSED = Operand((5, 5), "bool", data=tuple(float(j > i) for i in range(5) for j in range(5)))
_PADDED = Operand((2, 5), "bool", data=(0, 1, 0, 1, 1) + (0,) * 5)
_EACH = Operand((2, 4, 5, 5), "bool", data=tuple(float(j == 3) for _ in range(40) for j in range(5)))

CASES = [
    case(_NAME, _TEXT, _TEXT, _TEXT, 16, 4, *_WEIGHTS),
    case(_NAME, _TEXT, _TEXT, _TEXT, 16, 4, *_WEIGHTS, _CLOSED, True, False, 0),
    case(_NAME, _TEXT, _OTHER, _OTHER, 16, 2, *_WEIGHTS, _PADDED, True, True, 1),
    case(_NAME, _TEXT, _TEXT, _TEXT, 16, 4, *_WEIGHTS, _EACH, True, True, 2),
]
CASES = [each.storing(24) for each in CASES]
CASES += [refused("mask_type=1", _NAME, _TEXT, _TEXT, _TEXT, 16, 4, *_WEIGHTS, _CLOSED, True, True, 1)]
