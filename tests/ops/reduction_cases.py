"""Cases of reductions and normalisations."""

from __future__ import annotations

import torch

from tests.ops.cases import INT, Case, Operand, booleans, case, floats, integers, refused, values

NAN, INF = float("nan"), float("inf")
MATRIX, CUBE = floats(5, 40), floats(3, 5, 40)
TURNED = floats(40, 5, 3).through("aten.permute.default", (2, 1, 0))
LONG = floats(2, 1500)
HOLES = values(1.0, NAN, 3.0, -INF, INF, 2.0, 2.5, -7.0)


def _along(op: str) -> list[Case]:
    """A reduction with ``dim`` and ``keepdim`` along every kind of dimension."""
    return [
        case(op, MATRIX, [1]),
        case(op, MATRIX, [0]),
        case(op, MATRIX, [-1], True),
        case(op, CUBE, [0, 2]),
        case(op, CUBE, [1], True),
        case(op, CUBE, [-1, -2, 0]),
        case(op, TURNED, [2]),
        case(op, LONG, [1], True),
        case(op, floats(4, 200), [1]),
        case(op, floats(4, 1), [1]),
        case(op, floats(7), [0]),
    ]


SUMS = [
    *_along("sum.dim_IntList"),
    *_along("mean.dim"),
    case("sum.default", MATRIX),
    case("sum.default", floats()),
    case("sum.dim_IntList", MATRIX, []),
    case("sum.dim_IntList", MATRIX, None),
    case("sum.dim_IntList", floats(3, 0), [1]),
    case("sum.dim_IntList", floats(0, 3), [1]),
    case("sum.dim_IntList", floats(), [0]),
    case("sum.dim_IntList", values(1.0, NAN, 2.0), [0]),
    case("sum.default", integers(4, 5)),
    case("sum.dim_IntList", integers(4, 5, dtype="int32"), [1]),
    case("sum.dim_IntList", booleans(4, 5), [1], True),
    case("sum.dim_IntList", integers(4, 5), [1], dtype=torch.float32),
    case("sum.dim_IntList", booleans(4, 500), [1]),
    case("mean.default", MATRIX),
    case("mean.default", floats()),
    case("mean.dim", MATRIX, None, True),
    case("mean.dim", integers(4, 5), [1], dtype=torch.float32),
    case("mean.dim", floats(3, 0), [1]),
    *(case(f"{name}.default", operand, dim) for name in ("nansum", "nanmean")
      for operand, dim in ((MATRIX, [1]), (MATRIX, None), (HOLES, None), (values(NAN, NAN), [0]))),
    case("nansum.default", integers(4, 5), [1], True),
    case("count_nonzero.default", integers(4, 5)),
    case("count_nonzero.dim_IntList", integers(4, 5, low=-1, high=2), [1]),
    case("count_nonzero.dim_IntList", values(0.0, NAN, -0.0, 1.0), [0]),
    case("count_nonzero.default", booleans(3, 5), 0),
    case("histc.default", MATRIX, 8, -1, 1),
    case("histc.default", values(0.0, 3.0, NAN, 3.0, -1.0, 7.0, 2.0, 8.0), 8, 0, 7),
    refused("known beforehand", "histc.default", MATRIX, 8),
]  # fmt: skip

_WIDE = Operand((3, 2), INT, data=(2.0**40, -(2.0**40), -(2.0**63), -(2.0**52), 2.0**52 + 1, 2.0**52))
EXTREMA = [
    *_along("amax.default"),
    *_along("amin.default"),
    case("amax.default", MATRIX),
    case("amin.default", CUBE, [], True),
    *(case(f"{name}.default", HOLES, [0]) for name in ("amax", "amin")),
    *(case(f"{name}.default", integers(4, 5, dtype="int32"), [1]) for name in ("amax", "amin")),
    *(case(f"{name}.default", integers(4, 5, dtype="int32")) for name in ("max", "min")),
    *(case(f"{name}.default", _WIDE, [1], True) for name in ("amax", "amin")),
    *(case(f"{name}.default", integers(3, 1500, low=-(2**40), high=2**40), [1]) for name in ("amax", "amin")),
    *(case(f"{name}.default", integers(4, 5)) for name in ("max", "min")),
    *(case(f"{name}.default", booleans(4, 5), [1]) for name in ("amax", "amin")),
    *(case(f"{name}.dim", booleans(4, 5), 1, True) for name in ("max", "min")),
    case("max.default", booleans(4, 5)),
    case("aminmax.default", MATRIX, dim=1),
    case("aminmax.default", CUBE, dim=0, keepdim=True),
    case("aminmax.default", LONG),
    case("aminmax.default", HOLES),
    case("aminmax.default", integers(4, 5), dim=-1),
    *(case(f"{name}.default", MATRIX) for name in ("max", "min")),
]

PRODUCTS = [
    case("prod.dim_int", floats(5, 40, low=0.8, high=1.2), 1),
    case("prod.dim_int", floats(5, 40, low=0.8, high=1.2), 0, True),
    case("prod.dim_int", floats(2, 1500, low=0.99, high=1.01), 1),
    case("prod.dim_int", values(2.0, NAN, 0.0), 0),
    case("prod.dim_int", integers(4, 500, low=-3, high=4), 1),  # which wraps around
    case("prod.default", floats(4, 6)),
]
_TIES = integers(4, 300, low=0, high=3)
PLACES = [
    case("argmax.default", MATRIX, 1),
    case("argmax.default", MATRIX, 0, True),
    case("argmax.default", LONG, 1),
    case("argmax.default", HOLES),
    case("argmax.default", _WIDE, 1),
    case("argmax.default", _TIES, 1),
    case("argmin.default", _TIES, 0),
    case("argmin.default", values(1.0, NAN, NAN, 9.0), 0),
    *(refused("of bool", op, booleans(4, 5), 1) for op in ("argmax.default", "argmin.default")),
    case("max.dim", MATRIX, 1),
    case("min.dim", _TIES, -1, True),
]

VARIANCES = [
    case("var.correction", MATRIX, [1]),
    case("var.correction", floats(40, 6, low=100, high=101), [0], correction=0, keepdim=True),
    case("var.correction", LONG, [1], correction=2.5),
    case("std.correction", CUBE, [0, 2]),
    case("var_mean.correction", MATRIX, [1], correction=1),
    case("var_mean.dim", CUBE, [-1], False, True),
    case("std_mean.correction", MATRIX, [1]),
    case("std_mean.default", MATRIX),
    *(case(f"{op}.default", MATRIX) for op in ("var", "std", "var_mean")),
]

LOGARITHMS = [
    case("logsumexp.default", MATRIX, [1]),
    case("logsumexp.default", floats(40, 6, low=-90, high=90), [0], True),
    case("logsumexp.default", LONG, [0, 1]),
]

# What needs no kernel of its own to be seen: these are evaluated, not run.
MEANINGS = [
    case("prod.dim_int", floats(3, 5, 40, low=-1.2, high=-0.8), 1, True),
    case("prod.default", floats()),
    case("prod.dim_int", values(INF, -2.0), 0, True),
    case("prod.dim_int", floats(3, 0), 1),
    case("prod.default", integers(3, 4, low=-2, high=3)),
    case("prod.dim_int", integers(4, 5, dtype="int32"), 0),
    case("prod.dim_int", booleans(4, 5), 1),
    case("prod.dim_int", integers(4, 5, low=1, high=4), 1, dtype=torch.float32),
    *(
        case(op, *args)
        for op in ("argmax.default", "argmin.default")
        for args in (
            (MATRIX, -1, True), (CUBE, 1), (TURNED, 2), (LONG,), (MATRIX, None, True), (floats(4, 1), 1), (floats(),),
            (floats(7), 0), (HOLES,), (values(-INF, -INF), 0), (values(INF, INF), 0), (values(1.0, NAN, NAN, 9.0), 0),
            (values(2.0, 5.0, 1.0, 5.0, 1.0),), (_TIES, 1), (_TIES,), (_WIDE, 1),
            (integers(4, 5, dtype="int32"), 1, True), (integers(3, 40, dtype="uint8", low=0, high=9), 1),
        )
    ),
    *(
        case(op, *args)
        for op in ("var", "std", "var_mean", "std_mean")
        for op, *args in (
            (f"{op}.default", MATRIX), (f"{op}.default", MATRIX, False), (f"{op}.dim", CUBE, [1], False, True),
            (f"{op}.dim", CUBE, [-1]), (f"{op}.correction", floats(5, 1), [1]), (f"{op}.correction", floats(), None),
            (f"{op}.correction", values(1.0, NAN, 2.0), [0]), (f"{op}.dim", floats(3, 0), [1]),
        )
    ),
    *(
        case("logsumexp.default", operand, [0])
        for operand in (values(-INF, -INF), values(INF, 1.0), values(1.0, NAN), floats(0, 3), integers(4, 3), HOLES)
    ),
    *(case(op, *args) for op in ("max.dim", "min.dim") for args in ((CUBE, 0, True), (HOLES, 0), (_TIES, 1))),
]  # fmt: skip

_MASK = integers(4, 6, low=0, high=2)
TRUTHS = [
    *(case(f"{name}.default", operand) for name in ("any", "all") for operand in (booleans(4, 6), floats(3))),
    *(case(f"{name}.dim", _MASK, 1) for name in ("any", "all")),
    *(case(f"{name}.dim", booleans(4, 6), -2, True) for name in ("any", "all")),
    *(case(f"{name}.dims", booleans(2, 2, 2), [0, 2]) for name in ("any", "all")),
    *(case(f"{name}.default", values(0.0, NAN)) for name in ("any", "all")),
    *(case(f"{name}.dim", floats(3, 0), 1) for name in ("any", "all")),
    *(case(f"{name}.dim", booleans(3, 0), 0, True) for name in ("any", "all")),
    *(case(f"{name}.default", booleans(0)) for name in ("any", "all")),
    *(case(f"{name}.default", booleans(1)) for name in ("any", "all")),
    *(case(f"{name}.dims", booleans(2, 3, 0), [1, 2]) for name in ("any", "all")),
    *(case(f"{name}.dims", _MASK, []) for name in ("any", "all")),
    *(case(f"{name}.dims", booleans(2, 2, 2)) for name in ("any", "all")),
    *(case(f"{name}.dim", booleans(3, 1500), 1) for name in ("any", "all")),
    *(case(f"{name}.dim", integers(4, 3, low=0, high=2, dtype="uint8"), 1) for name in ("any", "all")),
    *(case(f"{name}.dims", integers(4, 3, low=0, high=2, dtype="uint8"), []) for name in ("any", "all")),
]

_MASKED = values(-INF, -INF, 1.0, 2.0, -INF, 0.5)
_ALL_MASKED = values(-INF, -INF, -INF)
SOFTMAX = [
    *(
        case(op, operand, dim)
        for op in ("softmax.int", "log_softmax.int")
        for operand, dim in ((MATRIX, -1), (MATRIX, 0), (CUBE, 1), (TURNED, 2), (floats(7), 0), (LONG, 1))
    ),
    *(case(op, floats(3, 9, low=-90, high=90), -1) for op in ("softmax.int", "log_softmax.int")),
    *(case("softmax.int", operand, 0) for operand in (_MASKED, _ALL_MASKED, values(1.0, NAN), floats(1))),
    case("softmax.int", floats(), 0),
    case("softmax.int", floats(2, 1, 3, 4), 1),
    case("softmax.int", integers(3, 4), 1, torch.float32),
    case("_softmax.default", MATRIX, 1, False),
    case("_log_softmax.default", MATRIX, 0, False),
    case("_safe_softmax.default", MATRIX, 1),
    case("_safe_softmax.default", _MASKED, 0),
    case("_safe_softmax.default", _ALL_MASKED, 0),
]

_GAIN, _SHIFT = floats(40), floats(40)
_SMALL = floats(3, 40, low=-1e-3, high=1e-3)
LAYERS = [
    case("layer_norm.default", MATRIX, [40], _GAIN, _SHIFT),
    case("layer_norm.default", MATRIX, [40]),
    case("layer_norm.default", MATRIX, [40], _GAIN),
    case("layer_norm.default", CUBE, [5, 40], floats(5, 40), floats(5, 40)),
    case("layer_norm.default", TURNED, [40], _GAIN, _SHIFT),
    case("layer_norm.default", LONG, [1500]),
    case("layer_norm.default", _SMALL, [40], _GAIN, _SHIFT, 1e-3),
    case("rms_norm.default", MATRIX, [40], _GAIN, 1e-6),
    case("rms_norm.default", MATRIX, [40]),
    case("rms_norm.default", _SMALL, [40], _GAIN, 1e-5),
    case("rms_norm.default", CUBE, [5, 40], floats(5, 40), 1e-5),
]

_CHANNELS = tuple(floats(6) for _ in range(3))
_VARIANCE = floats(6, low=0.5, high=2)
BATCHES = [
    case("batch_norm.default", shape, *_CHANNELS, _VARIANCE, False, 0.1, 1e-5, True)
    for shape in (floats(2, 6, 4, 5), floats(2, 6), floats(2, 6, 7))
]
BATCHES += [
    case("batch_norm.default", floats(2, 6, 4, 5), None, None, floats(6), _VARIANCE, False, 0.1, 1e-3, True),
    case("batch_norm.default", floats(2, 6, 3, 3), floats(6), None, floats(6), _VARIANCE, False, 0.1, 1e-5, True),
    refused("model.eval()", "batch_norm.default", floats(2, 6), *_CHANNELS, _VARIANCE, True, 0.1, 1e-5, True),
    # the normalised values are stored before they are scaled by channel
    case("group_norm.default", floats(2, 6, 4, 5), 3, floats(6), floats(6)).storing(2),
    case("group_norm.default", floats(2, 6, 4, 5), 1),
    case("group_norm.default", floats(2, 6, 9), 6, floats(6), None, 1e-3).storing(2),
]

_FOUR = floats(2, 6, 4, 5)
NATIVE = [
    case("native_layer_norm.default", MATRIX, [40], _GAIN, _SHIFT, 1e-5),
    case("native_layer_norm.default", CUBE, [5, 40], None, None, 1e-5),
    case("native_layer_norm.default", _SMALL, [40], None, _SHIFT, 1e-3),
    case("_fused_rms_norm.default", MATRIX, [40], _GAIN, 1e-6),
    case("_fused_rms_norm.default", CUBE, [5, 40], None, None),
    case("instance_norm.default", _FOUR, floats(6), floats(6), None, None, True, 0.1, 1e-5, True).storing(2),
    case("instance_norm.default", floats(2, 6, 9), None, None, None, None, True, 0.1, 1e-3, True),
    case("instance_norm.default", _FOUR, *_CHANNELS, _VARIANCE, False, 0.1, 1e-5, True),
    refused("model.eval()", "instance_norm.default", _FOUR, None, None, floats(6), _VARIANCE, True, 0.1, 1e-5, True),
    case("native_group_norm.default", _FOUR, floats(6), floats(6), 2, 6, 20, 3, 1e-5).storing(2),
    case("native_group_norm.default", _FOUR, None, None, 2, 6, 20, 2, 1e-3),
]

CASES = [*SUMS, *EXTREMA, *PRODUCTS, *PLACES, *VARIANCES, *LOGARITHMS, *TRUTHS, *SOFTMAX, *LAYERS, *BATCHES, *NATIVE]
