"""Cases of attention beyond the forms that its kernels take."""

from __future__ import annotations

from tests.ops.cases import Operand, case, floats

_NAME = "scaled_dot_product_attention.default"
_FIVE, _WIDE = floats(2, 3, 2, 5, 8), floats(1, 4, 5, 264)
_GROUPS = floats(1, 2, 7, 264)

CASES = [
    case(_NAME, floats(5, 8), floats(7, 8), floats(7, 8)),
    case(_NAME, _FIVE, floats(2, 3, 2, 7, 8), floats(2, 3, 2, 7, 4)),
    case(_NAME, _FIVE, _FIVE, _FIVE, floats(3, 1, 5, 5)),
    case(_NAME, _FIVE, _FIVE, _FIVE, floats(5, 5), scale=0.3),
    case(_NAME, _FIVE, _FIVE, _FIVE, Operand((1, 3, 2, 5, 5), "bool", -1, 1)),
    case(_NAME, *[floats(2, 3, 1, 9, 264)] * 3, floats(3, 1, 9, 9)),
    case(_NAME, *[floats(2, 1, 2, 2, 5, 16)] * 3, floats(1, 2, 1, 5, 5)),
    case(_NAME, floats(3, 2, 1, 1, 16), *[floats(3, 2, 1, 300, 16)] * 2, floats(1, 2, 1, 1, 300)),
    case(_NAME, floats(3, 5, 16), floats(3, 7, 16), floats(3, 7, 16), floats(3, 5, 7)),
    case(_NAME, floats(2, 4, 5, 15), floats(2, 4, 7, 15), floats(2, 4, 7, 33)),
    case(_NAME, floats(2, 4, 5, 16), floats(2, 4, 7, 16), floats(2, 4, 7, 16), is_causal=True),
    case(_NAME, floats(2, 4, 7, 16), floats(2, 4, 5, 16), floats(2, 4, 5, 16), is_causal=True),
    case(_NAME, _WIDE, floats(1, 4, 7, 264), floats(1, 4, 7, 12), floats(1, 1, 5, 7)),
    case(_NAME, _WIDE, _GROUPS, _GROUPS, is_causal=True, enable_gqa=True),
    case(_NAME, _WIDE, _GROUPS, _GROUPS, Operand((1, 1, 5, 7), "bool", data=(0,) * 7 + (1, 0) * 14), enable_gqa=True),
    case(_NAME, floats(2, 4, 5, 16), floats(2, 1, 7, 16), floats(2, 1, 7, 16), floats(5, 7)),
    case(_NAME, floats(1, 2, 0, 8), floats(1, 2, 5, 8), floats(1, 2, 5, 8)),
    case(_NAME, floats(0, 2, 3, 8), floats(0, 2, 5, 8), floats(0, 2, 5, 8)),
]
CASES = [each.storing(4) for each in CASES]
