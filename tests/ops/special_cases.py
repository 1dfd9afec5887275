"""Cases of inverse functions, gamma functions, integer division, and of sums of products by equations."""

from __future__ import annotations

from tests.ops.cases import booleans, case, floats, integers, refused, values

NAN, INF = float("nan"), float("inf")
SPECIAL = values(NAN, INF, -INF, 0.0, -0.0, 1.5, -1.5, 100.0)
MATRIX, ROW, WIDE = floats(3, 8), floats(8), floats(3, 40, low=-9, high=9)
UNIT = floats(3, 40, low=-0.999, high=0.999)
WHOLE, DIVISORS = integers(4, 5, low=-9, high=10), integers(5, low=1, high=5)
SIGNED = values(3, -3, 7, -7, 1, -1, 2, -2, dtype="int64")
OTHER = values(2, 2, -3, -3, 1, -1, -2, 2, dtype="int64")

ANGLES = [
    *(case(f"{name}.default", x) for name in ("asin", "acos") for x in (UNIT, values(1.0, -1.0, 0.0, 0.5, -0.5, 2.0))),
    *(case("atan.default", x) for x in (UNIT, WIDE, SPECIAL)),
    case("atan2.default", WIDE, floats(3, 40, low=-9, high=9)),
    case("atan2.default", values(0.0, -0.0, 0.0, -0.0, 1.0, INF, -INF, INF),
         values(1.0, 1.0, -1.0, -1.0, 0.0, INF, INF, -INF)),
    case("sinc.default", WIDE),
    case("sinc.default", values(0.0, 1.0, 0.5)),
]  # fmt: skip

ERRORS = [
    *(case("erfc.default", x) for x in (UNIT, floats(3, 40, low=-4, high=4), SPECIAL)),
    case("erfinv.default", UNIT),
    case("erfinv.default", values(0.0, 1.0, -1.0, 0.9990234375, 2.0)),
    case("special_ndtr.default", floats(3, 40, low=-3, high=3)),
    *(case(f"{name}.default", floats(3, 40, low=0.25, high=20)) for name in ("lgamma", "digamma")),
    *(case(f"{name}.default", values(-0.5, -1.5, -2.25, 0.5, 30.0, 0.125)) for name in ("lgamma", "digamma")),
    case("logit.default", floats(3, 8, low=0.05, high=0.95)),
    case("logit.default", floats(3, 8, low=-0.5, high=1.5), 0.125),
    case("special_entr.default", floats(3, 8, low=0, high=3)),
    case("special_entr.default", values(0.0, -1.0, 1.0, 0.5)),
    case("special_xlog1py.default", MATRIX, floats(8, low=0, high=3)),
    case("xlogy.Scalar_Other", MATRIX, 3.0),
    case("logaddexp2.default", WIDE, floats(40, low=-9, high=9)),
    case("ldexp.Tensor", MATRIX, integers(8, low=-3, high=4)),
]

SIGNS = [
    case("signbit.default", SPECIAL),
    case("signbit.default", WHOLE),
    case("copysign.Tensor", MATRIX, ROW),
    case("copysign.Tensor", values(1.0, -2.0, 3.0, -4.0), values(-0.0, 0.0, -1.0, INF)),
    case("copysign.Scalar", MATRIX, -1.0),
    case("nan_to_num.default", SPECIAL, 2.0, 7.0, -7.0),
    case("nan_to_num.default", values(NAN, 1.0, -2.0)),
    case("nan_to_num.default", WHOLE),
    case("round.decimals", floats(3, 8, low=-9, high=9), decimals=0),
    case("round.decimals", values(1.25, -3.75, 1234.0, 0.03125), decimals=1),
    case("round.decimals", values(125.0, -375.0, 1234.0), decimals=-2),
    case("relu6.default", floats(3, 8, low=-3, high=9)),
    case("rrelu.default", MATRIX),
    refused("model.eval()", "rrelu.default", MATRIX, 0.1, 0.3, True),
    case("addcmul.default", MATRIX, floats(3, 8), ROW),
    case("addcmul.default", MATRIX, floats(3, 1), ROW, value=-0.5),
    case("addcmul.default", integers(4), integers(4), integers(4), value=3),
]

INTEGERS = [
    *(case(f"{name}.Tensor", a, b) for name in ("remainder", "fmod") for a, b in ((WHOLE, DIVISORS), (SIGNED, OTHER))),
    *(case(f"{name}.Scalar", WHOLE, n) for name in ("remainder", "fmod") for n in (3, -4)),
    case("remainder.Scalar", WHOLE, 2.5),
    case("remainder.Scalar_Tensor", 7, DIVISORS),
    case("floor_divide.default", SIGNED, OTHER),
    case("floor_divide.default", WHOLE, 3),
    case("floor_divide.default", MATRIX, 0.75),
    case("floor_divide.default", integers(30, low=0, high=256, dtype="uint8"), 7),
    *(case("div.Tensor_mode", SIGNED, OTHER, rounding_mode=mode) for mode in ("floor", "trunc")),
    case("div.Scalar_mode", WHOLE, 4, rounding_mode="floor"),
    refused("booleans", "floor_divide.default", booleans(4), 2),
    *(case("pow.Tensor_Scalar", WHOLE, n) for n in (0, 1, 4, 5)),
    refused("from 0 to 63", "pow.Tensor_Scalar", integers(4, low=1, high=3), 64),
    case("pow.Scalar", -2.0, values(0.0, 1.0, 2.0, 3.0, -1.0)),
    *(case(f"bitwise_{name}_shift.Tensor_Scalar", integers(9, low=0, high=99), 2) for name in ("left", "right")),
    *(case(f"bitwise_{name}_shift.Tensor", integers(9, low=0, high=99), integers(9, low=0, high=5))
      for name in ("left", "right")),
    refused("expected 0 to 63", "bitwise_left_shift.Tensor_Scalar", WHOLE, 64),
    case("isin.Tensor_Tensor", WHOLE, integers(3, low=-4, high=5)),
    case("isin.Tensor_Tensor", WHOLE, integers(2, 2, low=-4, high=5), invert=True),
    case("isin.Tensor_Scalar", WHOLE, 3),
    *(case(f"{name}_.Tensor", WHOLE, integers(5)) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(case(f"{name}_.Scalar", MATRIX, 0.5) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *(case(f"logical_{name}_.default", MATRIX, integers(8, low=0, high=2)) for name in ("and", "or", "xor")),
    case("logical_not_.default", integers(3, 8, low=0, high=2)),
    case("isclose.default", values(1.0, 1.0, INF, NAN, 0.0), values(1.0, 1.5, INF, NAN, 1.0)),
    case("isclose.default", values(1.0, NAN), values(1.25, NAN), 0.5, 0.0, True),
]  # fmt: skip

BATCH = floats(3, 5, 16)
CONTRACTIONS = [
    case("addmv.default", floats(5), floats(5, 16), floats(16)),
    case("addmv.default", floats(5), floats(5, 16), floats(16), beta=0.5, alpha=2),
    case("addr.default", floats(5, 4), floats(5), floats(4), beta=0.5, alpha=2),
    case("addbmm.default", floats(5, 4), BATCH, floats(3, 16, 4), beta=0.5, alpha=2),
    case("addbmm.default", floats(4), BATCH, floats(3, 16, 4), beta=0),
    case("inner.default", floats(5, 16), floats(2, 3, 16)),
    case("inner.default", floats(16), floats(16)),
    case("linalg_vecdot.default", floats(5, 16), floats(16)),
    case("tensordot.default", floats(3, 4, 5), floats(4, 3, 2), [0, 1], [1, 0]),
    case("tensordot.default", floats(3, 4), floats(5, 2), [], []),
    case("chain_matmul.default", [floats(5, 16), floats(16, 2), floats(2, 9)]).storing(2),
    case("linalg_multi_dot.default", [floats(16), floats(16, 2), floats(2, 9), floats(9)]).storing(3),
    case("kron.default", floats(2, 3), floats(3, 2)),
    case("kron.default", floats(3), floats(2, 3, 2)),
    case("bilinear.default", floats(5, 3), floats(5, 4), floats(6, 3, 4), floats(6)).storing(2),
    case("bilinear.default", floats(2, 5, 3), floats(2, 5, 4), floats(6, 3, 4)).storing(2),
    *(case("einsum.default", equation, [*operands]) for equation, operands in (
        ("ij,jk->ik", (floats(5, 16), floats(16, 4))),
        ("bik,bkj", (BATCH, floats(3, 16, 4))),
        ("bchw,bdhw->bcd", (floats(2, 3, 4, 5), floats(2, 6, 4, 5))),
        ("...ij,...kj->...ik", (floats(2, 3, 5, 8), floats(2, 3, 4, 8))),
        ("...ij,jk->...ik", (floats(2, 3, 5, 8), floats(8, 4))),
        ("i,j->ij", (floats(5), floats(4))),
        ("ij->ji", (floats(5, 4),)),
        ("ij->", (floats(5, 4),)),
        ("ii->i", (floats(5, 5),)),
        ("ii", (floats(5, 5),)),
        ("ijk,il->jkl", (floats(4, 3, 5), floats(4, 6))),
        ("bhwc,hkc->bhwk", (floats(2, 3, 4, 8), floats(3, 5, 8))),
        ("ij,i->ij", (floats(4, 5), floats(4))),
        ("bn,anm,bm->ba", (floats(2, 3), floats(6, 3, 4), floats(2, 4))),
    )),
    case("einsum.default", "bi,bi->b", [floats(4, 9), floats(4, 9)]),
]  # fmt: skip
CONTRACTIONS = [each.storing(2) if "einsum" in each.op else each for each in CONTRACTIONS]

NORMS = [
    case("_weight_norm.default", floats(6, 4, 3), floats(6, 1, 1)),
    case("_weight_norm.default", floats(6, 4), floats(1, 4), 1),
    case("_weight_norm_interface.default", floats(6, 4, 3), floats(6, 1, 1)).storing(2),
    case("batch_norm.default", floats(4, 6), floats(6), floats(6), floats(6), floats(6, low=0.5, high=2), False, 0.1,
         1e-5, False),
    case("batch_norm.default", floats(2, 6, 9), floats(6), floats(6), floats(6), floats(6, low=0.5, high=2), False, 0.1,
         1e-5, False),
    case("batch_norm.default", floats(2, 6, 3, 2, 2), floats(6), floats(6), floats(6), floats(6, low=0.5, high=2),
         False, 0.1, 1e-5, False),
    case("instance_norm.default", floats(2, 6, 9), floats(6), floats(6), None, None, True, 0.1, 1e-5, False),
    case("group_norm.default", floats(2, 6, 3, 4, 2), 3, floats(6), floats(6)).storing(2),
    case("layer_norm.default", floats(2, 3, 4, 5), [4, 5], floats(4, 5), floats(4, 5)),
]  # fmt: skip

CASES = [*ANGLES, *ERRORS, *SIGNS, *INTEGERS, *CONTRACTIONS, *NORMS]
