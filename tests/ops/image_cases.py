"""Cases of convolutions of lines and volumes, transposed ones, poolings, resizing and padding."""

from __future__ import annotations

from tests.ops.cases import Case, case, floats, integers, refused, values

LINE, VOLUME = floats(2, 4, 9), floats(2, 4, 5, 6, 7)
ROWS = floats(2, 16, 11)

LINES = [
    case("conv1d.default", ROWS, floats(24, 16, 3), floats(24), [1], [1]),
    case("conv1d.default", ROWS, floats(24, 16, 3), None, [2], [1]),
    case("conv1d.default", floats(1, 1, 60), floats(32, 1, 10), floats(32), [5]),
    case("conv1d.default", floats(2, 16, 12), floats(16, 1, 4), floats(16), [1], [3], [1], 16),
    case("conv1d.default", floats(4, 9), floats(6, 4, 3), floats(6)),
    case("conv1d.default", floats(2, 9, 16).through("aten.transpose.int", 1, 2), floats(24, 16, 3)),
    case("conv1d.padding", floats(2, 16, 12), floats(16, 1, 4), None, [1], "same", [1], 16),
    case("conv1d.padding", LINE, floats(6, 4, 3), None, [2], "valid"),
]

_TAPS = floats(6, 4, 3, 3, 3)
VOLUMES = [
    case("conv3d.default", VOLUME, _TAPS, floats(6)),
    case("conv3d.default", VOLUME, _TAPS, None, [1, 2, 1], [1, 0, 2], [2, 1, 1]),
    case("conv3d.default", VOLUME, floats(6, 2, 2, 3, 1), floats(6), [2], [1], [1], 2),
    case("conv3d.default", VOLUME, floats(4, 1, 3, 3, 3), None, [1], [1], [1], 4),
    case("conv3d.default", VOLUME, floats(6, 4, 1, 3, 3), None, [1, 1, 1], [0, 1, 1]),
    case("conv3d.default", VOLUME, floats(6, 4, 3, 1, 1), floats(6), [2, 1, 1], [1, 0, 0]),
    case("conv3d.default", floats(1, 3, 4, 8, 8), floats(16, 3, 2, 4, 4), floats(16), [2, 4, 4]),
    case("conv3d.default", floats(4, 5, 6, 7), _TAPS),
    case("conv3d.padding", VOLUME, floats(6, 4, 2, 3, 3), None, [1, 1, 1], "same"),
    case("convolution.default", VOLUME, _TAPS, None, [1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1),
    case("conv3d.default", floats(1, 8, 3, 4, 4), floats(8, 8, 3, 3, 3), floats(8), [1], [1]),
]

IMAGES = [
    case("conv2d.default", floats(3, 9, 8), floats(5, 3, 3, 3), floats(5), (1, 1), (1, 1)),
    case("conv2d.default", floats(2, 24, 9, 10), floats(24, 1, 7, 7), floats(24), (1, 1), (3, 3), (1, 1), 24),
    case("conv2d.default", floats(2, 24, 9, 10), floats(24, 1, 5, 5), None, (2, 2), (2, 2), (1, 1), 24),
    case("conv2d.default", floats(1, 24, 9, 10), floats(48, 1, 3, 3), None, (1, 1), (1, 1), (2, 2), 24),
    case("conv2d.default", floats(1, 1, 9, 10), floats(16, 1, 3, 3), floats(16), (2, 2), (1, 1)),
    case("_convolution.default", floats(1, 3, 9, 8), floats(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
         False, False, False, False),
]  # fmt: skip

TRANSPOSED = [
    case("conv_transpose1d.default", LINE, floats(4, 6, 3)),
    case("conv_transpose1d.default", LINE, floats(4, 6, 4), floats(6), [2], [1]),
    case("conv_transpose1d.default", LINE, floats(4, 6, 16), floats(6), [8], [4]),
    case("conv_transpose1d.default", LINE, floats(4, 3, 5), floats(6), [3], [2], [1], 2),
    case("conv_transpose1d.default", LINE, floats(4, 6, 3), None, [2], [1], [1], 1, [3]),
    case("conv_transpose1d.default", LINE, floats(4, 6, 2), floats(6), [3]),
    case("conv_transpose1d.default", floats(4, 9), floats(4, 6, 2), floats(6), [2]),
    case("conv_transpose2d.input", floats(2, 8, 5, 6), floats(8, 16, 2, 2), floats(16), [2, 2]),
    case("conv_transpose2d.input", floats(2, 8, 5, 6), floats(8, 16, 4, 4), floats(16), [2, 2], [1, 1]),
    case("conv_transpose2d.input", floats(2, 8, 5, 6), floats(8, 3, 3, 3), None, [2, 2], [1, 1], [1, 1]),
    case("conv_transpose2d.input", floats(1, 4, 5, 6), floats(4, 3, 3, 2), None, [2, 1], [0, 1], [1, 0], 2, [1, 2]),
    case("conv_transpose2d.input", floats(1, 4, 5, 6), floats(4, 1, 3, 3), None, [1, 1], [1, 1], [0, 0], 4),
    case("conv_transpose2d.input", floats(1, 4, 1, 1), floats(4, 8, 4, 4)),
    case("conv_transpose2d.input", floats(1, 4, 5, 5), floats(4, 3, 2, 2), None, [2, 2], [1, 1]),
    case("conv_transpose2d.input", floats(1, 4, 5, 5), floats(4, 3, 2, 2), None, [2, 2], [0, 0], [1, 1]),
    case("conv_transpose3d.input", floats(1, 4, 3, 4, 5), floats(4, 6, 2, 2, 2), floats(6), [2, 2, 2]),
    case("conv_transpose3d.input", floats(2, 4, 3, 4, 5), floats(4, 6, 3, 3, 3), None, [2, 1, 2], [1, 1, 1], [1, 0, 0]),
    case("convolution.default", floats(1, 3, 9, 8), floats(3, 5, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    refused("out of range", "convolution.default", floats(1, 3, 9, 8), floats(3, 5, 3, 3), None,
            [1, 1], [-1, -1], [1, 1], True, [0, 0], 1),
]  # fmt: skip

POOLED = floats(2, 5, 9, 8)
POOLINGS = [
    case("max_pool3d.default", VOLUME, [2, 2, 2]).storing(2),
    case("max_pool3d.default", VOLUME, [3, 2, 3], [2, 1, 2], [1, 0, 1], [1, 2, 1], True),
    case("avg_pool3d.default", VOLUME, [2, 2, 2]).storing(2),
    case("avg_pool3d.default", VOLUME, [3, 3, 3], [2, 2, 2], [1, 1, 1]).storing(2),
    case("avg_pool3d.default", VOLUME, [3, 3, 3], [2, 2, 2], [1, 1, 1], True, False).storing(2),
    case("avg_pool3d.default", VOLUME, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, 5).storing(2),
    case("avg_pool3d.default", floats(4, 5, 6, 7), [2, 2, 2]).storing(2),
    case("max_pool1d_with_indices.default", LINE, [3], [2], [1]),
    case("max_pool2d_with_indices.default", POOLED, [3, 3], [2, 2], [1, 1]),
    case("max_pool2d_with_indices.default", POOLED, [2, 2]),
    case("max_pool2d_with_indices.default", floats(5, 9, 8), [2, 3], [2, 2], [0, 1], [2, 1], True),
    case("max_pool3d_with_indices.default", VOLUME, [2, 3, 2], [2, 1, 2]),
    case("adaptive_max_pool1d.default", LINE, [4]),
    case("adaptive_max_pool1d.default", LINE, [1]),
    case("adaptive_max_pool2d.default", POOLED, [3, 3]),
    case("adaptive_max_pool2d.default", floats(5, 9, 8), [1, 1]),
    case("adaptive_max_pool2d.default", POOLED, [4, 5]),
    case("adaptive_max_pool3d.default", VOLUME, [2, 3, 3]),
    case("adaptive_avg_pool3d.default", VOLUME, [2, 3, 4]).storing(2),
    case("adaptive_avg_pool3d.default", VOLUME, [1, 1, 1]),
    case("adaptive_avg_pool3d.default", floats(4, 5, 6, 7), [2, 6, 1]).storing(2),
    case("max_unpool2d.default", floats(1, 2, 2, 2), values(0, 3, 9, 11, 5, 6, 8, 15, dtype="int64").through(
        "aten.view.default", [1, 2, 2, 2]), [4, 4]),
    case("max_unpool3d.default", floats(2, 1, 2, 2), values(0, 3, 9, 11, 5, 6, 8, 15, dtype="int64").through(
        "aten.view.default", [2, 1, 2, 2]), [2, 4, 4], [2, 2, 2], [0, 0, 0]),
]  # fmt: skip

PADDINGS = [
    case("constant_pad_nd.default", POOLED, [1, -2, -1, 3], 0.5),
    case("constant_pad_nd.default", POOLED, [-1, -2]),
    case("pad.default", POOLED, [1, 2, 3, 0], "reflect"),
    case("pad.default", POOLED, [1, 2, 3, 0], "replicate"),
    case("pad.default", POOLED, [1, 2, 3, 0], "circular"),
    case("pad.default", LINE, [9, 2], "circular"),
    case("pad.default", integers(2, 3, 4), [2, 1], "replicate"),
    case("reflection_pad1d.default", LINE, [8, 3]),
    case("reflection_pad2d.default", POOLED, [1, 2, 3, 4]),
    case("reflection_pad2d.default", floats(5, 9, 8), [0, -2, 3, 4]),
    case("reflection_pad3d.default", VOLUME, [1, 2, 3, 4, 0, 1]),
    case("replication_pad1d.default", floats(4, 9), [10, 0]),
    case("replication_pad2d.default", POOLED, [1, 2, 3, 14]),
    case("replication_pad3d.default", VOLUME, [1, 2, 3, 4, 0, 1]),
    case("pad.default", POOLED, [1, 1]),
]

_SMALL, _CHANNELS = floats(2, 3, 4, 5), floats(1, 16, 6, 5)


def _both(name: str, *args: object, rank: int = 2) -> list[Case]:
    """Sizes that divide, and others; up, down, and by factors, in both overloads."""
    x = {1: LINE, 2: _SMALL, 3: floats(1, 2, 3, 4, 5)}[rank]
    up, mixed = [[7, 8, 11][:rank], [2, 9, 3][:rank]]
    return [
        case(f"{name}.vec", x, up, *args, None),
        case(f"{name}.vec", x, mixed, *args, None),
        case(f"{name}.vec", x, None, *args, [2.0, 1.5, 0.7][:rank]),
        case(f"{name}.default", x, up, *args),
    ]


RESIZED = [
    *(c for rank in (1, 2, 3) for name in ("upsample_nearest", "_upsample_nearest_exact")
      for c in _both(f"{name}{rank}d", rank=rank)),
    *(c for name, rank in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3), ("bicubic2d", 2))
      for aligned in (False, True) for c in _both(f"upsample_{name}", aligned, rank=rank)),
    *(c for name in ("bilinear2d", "bicubic2d") for aligned in (False, True)
      for c in _both(f"_upsample_{name}_aa", aligned)),
    case("upsample_nearest2d.vec", _CHANNELS, [12, 10], None),
    case("upsample_bilinear2d.vec", _CHANNELS, [12, 10], False, None),
    case("upsample_nearest2d.vec", integers(1, 2, 3, 4, low=0, high=255, dtype="uint8"), None, [2.0, 2.0]),
    case("_upsample_bilinear2d_aa.vec", floats(1, 2, 16, 24), [5, 3], False, None),
    case("_upsample_bicubic2d_aa.vec", floats(1, 2, 16, 24), [5, 7], False, None),
    case("upsample_bilinear2d.default", _SMALL, [4, 5], True),
]  # fmt: skip

# several results are made of what one product or convolution stored; a filter goes along one dimension at a time
TRANSPOSED = [each.storing(2) for each in TRANSPOSED]
RESIZED = [each.storing(2) if "_aa" in each.op else each for each in RESIZED]
CASES = [*LINES, *VOLUMES, *IMAGES, *TRANSPOSED, *POOLINGS, *PADDINGS, *RESIZED]
