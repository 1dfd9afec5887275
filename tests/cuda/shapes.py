"""Sizes that reach every kernel: tiles, splits, edges, groups, transposed operands, long rows."""

from __future__ import annotations

from tests.ops.cases import Case, case, floats, integers
from tests.ops.indexing_cases import indices

__all__ = ["CASES"]


def _products() -> list[Case]:
    sizes = [
        (128, 128, 64),
        (200, 136, 72),
        (49, 512, 4608),
        (2048, 256, 512),
        (64, 1000, 2048),
        (300, 40, 8),
        (17, 24, 1024),
    ]
    found = []
    for m, n, k in sizes:
        bound = 0.5
        a, b = floats(m, k, low=-bound, high=bound), floats(n, k, low=-bound, high=bound)
        found.append(case("linear.default", a, b, floats(n)))
        found.append(case("mm.default", a, floats(k, n, low=-bound, high=bound)))
        if k >= 64:
            found.append(
                case(
                    "mm.default",
                    floats(k, m, low=-bound, high=bound).through("aten.t.default"),
                    b.through("aten.t.default"),
                )
            )
    for rows in (1, 2, 3, 5, 8):
        found.append(case("linear.default", floats(rows, 520), floats(1000, 520), floats(1000)))
    found.append(case("linear.default", floats(1, 1536), floats(8960, 1536)))
    found.append(case("bmm.default", floats(6, 40, 64), floats(6, 64, 72)))
    found.append(case("matmul.default", floats(2, 3, 40, 64), floats(2, 1, 64, 72)))
    found.append(case("mm.default", floats(300, 128), floats(128, 1)))
    return found


def _convolutions() -> list[Case]:
    found = []
    for batch, channels, outputs, side, taps, stride, padding in [
        (1, 64, 64, 28, 3, 1, 1),
        (2, 64, 128, 15, 3, 2, 1),
        (1, 128, 64, 7, 1, 1, 0),
        (1, 512, 512, 7, 3, 1, 1),
        (3, 256, 64, 14, 1, 2, 0),
        (5, 64, 64, 180, 3, 1, 1),
        (3, 32, 128, 150, 3, 1, 0),
        (7, 16, 64, 140, 5, 1, 2),
        (2, 3, 64, 37, 7, 2, 3),
        (2, 3, 72, 32, 3, 2, 1),
        (1, 1, 16, 20, 4, 2, 1),
        (1, 4, 65, 33, 5, 2, 2),
        (1, 24, 40, 11, 5, 1, 2),
        (4, 8, 16, 9, 3, 1, 1),
        (1, 20, 12, 9, 3, 1, 1),
    ]:
        x = floats(batch, channels, side, side + 3, low=-0.5, high=0.5)
        w = floats(outputs, channels, taps, taps, low=-0.5, high=0.5)
        found.append(case("conv2d.default", x, w, floats(outputs), [stride, stride], [padding, padding]))
    x = floats(2, 64, 12, 12, low=-0.5, high=0.5)
    found.append(case("conv2d.default", x, floats(128, 32, 3, 3, low=-0.5, high=0.5), None, [1, 1], [1, 1], [1, 1], 2))
    found.append(case("conv2d.default", x, floats(64, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], 64))
    turned = floats(2, 32, 9, 10, low=-0.5, high=0.5).through("aten.transpose.int", 2, 3)
    found.append(case("conv2d.default", turned, floats(32, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], 2))
    turned = floats(2, 3, 41, 20, low=-0.5, high=0.5).through("aten.transpose.int", 2, 3)
    found.append(case("conv2d.default", turned, floats(24, 3, 3, 3), None, [3, 2], [0, 1], [2, 1]))
    found.append(case("conv2d.default", x, floats(64, 64, 3, 3, low=-0.5, high=0.5), None, [1, 1], [2, 2], [2, 2]))
    return found


def _columns() -> list[Case]:
    """Reductions along rows that lie side by side, of one number and of several."""
    ops = (("argmax.default", 0), ("prod.dim_int", 1), ("var.correction", [0]))
    return [case(op, floats(40, 5, 64, low=0.9, high=1.1), dim) for op, dim in ops]


def _filters_of_one_channel() -> list[Case]:
    """Depthwise convolutions of images and lines, and of lines of samples: alone and several results a thread."""
    found = []
    for batch, channels, side, taps, stride, dilation in (
        (1, 96, 56, 7, 1, 1), (32, 96, 57, 5, 1, 1), (32, 64, 56, 3, 2, 1), (2, 24, 33, 3, 1, 2), (1, 40, 7, 7, 1, 1),
    ):  # fmt: skip
        pads, steps, gaps = [taps // 2] * 2, [stride] * 2, [dilation] * 2
        x, w = floats(batch, channels, side, side + 3), floats(channels, 1, taps, taps, low=-0.5, high=0.5)
        found.append(case("conv2d.default", x, w, floats(channels), steps, pads, gaps, channels))
    found.append(case("conv1d.default", floats(1, 1, 16000), floats(512, 1, 10), None, [5]))
    found.append(case("conv1d.default", floats(1, 1536, 200), floats(1536, 1, 4), None, [1], [3], [1], 1536))
    return found


def _lines_and_volumes() -> list[Case]:
    """Lines and volumes on tensor cores, and transposed convolutions."""
    low = {"low": -0.25, "high": 0.25}
    spread = floats(2, 64, 28, 28, **low)
    found = [
        case("conv1d.default", floats(1, 80, 3000, **low), floats(384, 80, 3, **low), floats(384), [1], [1]),
        case("conv1d.default", floats(1, 512, 999, **low), floats(512, 512, 3, **low), None, [2]),
        case("conv3d.default", floats(1, 64, 8, 28, 28, **low), floats(64, 64, 3, 3, 3, **low), None, [1], [1]),
        case(
            "conv3d.default", floats(1, 3, 8, 56, 56, **low), floats(64, 3, 3, 7, 7, **low), None, [1, 2, 2], [1, 3, 3]
        ),
        case("conv3d.default", floats(1, 45, 8, 28, 28, **low), floats(64, 45, 3, 1, 1, **low), None, [1], [1, 0, 0]),
        case("conv_transpose2d.input", spread, floats(64, 32, 2, 2, **low), floats(32), [2, 2]),
        case("conv_transpose2d.input", spread, floats(64, 32, 4, 4, **low), floats(32), [2, 2], [1, 1]),
        case("conv_transpose1d.default", floats(1, 64, 100, **low), floats(64, 32, 16, **low), floats(32), [8], [4]),
    ]
    return [each.storing(2) if "transpose" in each.op else each for each in found]


def _resized() -> list[Case]:
    """Images in packs of channels, at computed places."""
    x = floats(2, 64, 28, 30)
    return [
        case("upsample_nearest2d.vec", x, [56, 60], None),
        case("upsample_bilinear2d.vec", x, [56, 61], False, None),
        case("upsample_bicubic2d.vec", x, [33, 47], True, None),
        case("_upsample_bilinear2d_aa.vec", x, [14, 11], False, None).storing(2),
        case("pad.default", x, [1, 2, 3, 1], "reflect"),
    ]


def _long_rows() -> list[Case]:
    """Rows that one block sorts, and more; a long index, which is sorted first."""
    add, reduced = "index_add.default", "index_reduce.default"
    small = {"low": 0.0, "high": 0.1}
    return [
        *(case("sort.stable", floats(rows, size), stable=True) for rows, size in ((9, 1024), (2, 8192), (3, 70000))),
        case("sort.stable", integers(2, 4000, low=-99, high=99), stable=True, dim=-1, descending=True),
        case(add, floats(300, 64), 0, indices(20_000, below=300), floats(20_000, 64, **small)),
        case(add, floats(2, 500, 3), 1, indices(300_000, below=500), floats(2, 300_000, 3, low=0.0, high=0.001)),
        case(reduced, floats(70, 300), 0, indices(9000, below=3), floats(9000, 300), "amax"),
        case(reduced, floats(70, 40), 0, indices(9000, below=70), floats(9000, 40), "mean", include_self=False),
    ]


CASES = [*_products(), *_convolutions(), *_columns()]
CASES += [*_filters_of_one_channel(), *_lines_and_volumes(), *_resized(), *_long_rows()]
