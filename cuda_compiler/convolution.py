"""Lowers convolutions: products of matrices on tensor cores, or one result a thread where channels are few."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cuda_compiler.anchors import TILE_FILES, anchor_launch, anchor_source
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import pack_size, resolve_anchor
from cuda_compiler.skeleton import assemble
from cuda_compiler.tiles import choose_tiling
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.params import ParamStruct
from npu_compiler.codegen.target import Launch, Lowering
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.expr import Ref
from npu_compiler.trace import TracedTensor

__all__ = ["IMAGE_DIMS", "image_values", "lower_conv2d", "packed_channels"]

IMAGE_DIMS = ((), (0, 2, 3), (1,))  # a row is a pixel of [N, C, H, W], a column a channel
_PIECE, _SMALL_PIECE = 8, 4  # channels copied at a time: 16 bytes, or 8 for images of up to four channels
_FEW_OUTPUTS = 8  # in a group: fewer waste most of a tile
_PLAIN_THREADS = 128
_PACK_THREADS = 256


@dataclass(frozen=True)
class _Convolution:
    """A convolution whose operands are resolved.

    Attributes:
        image, weight: The operands [N, C, H, W] and [O, C / groups, KH, KW].
        image_ref, weight_ref: Where these lie.
        groups: Groups of channels.
        outputs: Channels of the result in one group.
    """

    image: TracedTensor
    weight: TracedTensor
    image_ref: Ref
    weight_ref: Ref
    groups: int
    outputs: int

    @property
    def channels(self) -> int:
        """Channels of the image in one group."""
        return self.weight_ref.view.shape[1]

    @property
    def products(self) -> int:
        """Multiplications for one result."""
        return prod(self.weight_ref.view.shape[1:])


def packed_channels(channels: int) -> int:
    """Channels of a weight or of a packed image, the zeros behind them included."""
    piece = _SMALL_PIECE if channels <= _SMALL_PIECE else _PIECE
    return -(-channels // piece) * piece


def lower_conv2d(group: Group, lowering: Lowering) -> list[Launch]:
    """One launch, and one before it where the image's channels must be packed.

    Raises:
        OpRefusal: A tensor is too large.
    """
    source = anchor_source(group)
    image, weight = source.operands
    groups = source.attrs["groups"]
    tensors = lowering.tensors[image.tensor], lowering.tensors[weight.tensor]
    found = _Convolution(*tensors, image, weight, groups, weight.view.shape[0] // groups)
    if not _fits_tiles(found):
        return [_lower_plain(found, group, lowering)]
    if _is_packed_image(found.image_ref, found.channels):
        return [_lower_tiled(found, group, lowering, _argument(found.image, found.image_ref))]
    packing, packed = _pack(found, lowering)
    return [packing, _lower_tiled(found, group, lowering, packed)]


def image_values(ref: Ref, out: tuple[int, ...]) -> dict[str, int]:
    """Parameters that say where the pixels of an image lie."""
    image_stride, channel_stride, y_stride, x_stride = ref.view.strides
    return {
        "height": ref.view.shape[2],
        "width": ref.view.shape[3],
        "out_height": out[2],
        "out_width": out[3],
        "image_stride": image_stride,
        "y_stride": y_stride,
        "x_stride": x_stride,
        "channel_stride": channel_stride,
    }


def _fits_tiles(found: _Convolution) -> bool:
    """Whether tensor cores can do it without most of a tile lying idle."""
    half = found.image.dtype == found.weight.dtype and found.image.dtype in (FLOAT16, BFLOAT16)
    whole_pieces = found.groups == 1 or found.channels % _PIECE == 0
    return half and whole_pieces and found.outputs >= _FEW_OUTPUTS and _is_packed_weight(found.weight_ref)


def _is_packed_weight(ref: Ref) -> bool:
    """Whether a weight lies as [O, KH, KW, I], with the channels packed."""
    _, channels, height, width = ref.view.shape
    packed = packed_channels(channels)
    expected = (packed * height * width, 1, width * packed, packed)
    pairs = zip(ref.view.shape, ref.view.strides, expected, strict=True)
    return ref.view.offset == 0 and all(n == 1 or stride == wanted for n, stride, wanted in pairs)


def _is_packed_image(ref: Ref, channels: int) -> bool:
    """Whether pixels follow each other without gaps between rows or images, each from a 16-byte border on."""
    image_stride, channel_stride, y_stride, x_stride = ref.view.strides
    batch, total, height, width = ref.view.shape
    followed = (width == 1 or x_stride == total) and (height == 1 or y_stride == width * total)
    followed &= batch == 1 or image_stride == height * width * total
    return followed and channel_stride == 1 and channels % _PIECE == 0 and ref.view.offset % _PIECE == 0


def _argument(tensor: TracedTensor, ref: Ref) -> TensorArg:
    return TensorArg(tensor.index, ref.view.offset * tensor.dtype.size)


def _geometry(group: Group, conv: _Convolution, channels: int) -> dict[str, object]:
    attrs = anchor_source(group).attrs
    _, _, taps_y, taps_x = conv.weight_ref.view.shape
    names = (("STEP", "stride"), ("PAD", "padding"), ("DILATION", "dilation"))
    pairs = {f"{name}_{axis}": attrs[key][i] for name, key in names for i, axis in enumerate("YX")}
    return {"TAPS_Y": taps_y, "TAPS_X": taps_x, "CHANNELS": channels, **pairs}


def _pack(conv: _Convolution, lowering: Lowering) -> tuple[Launch, TensorArg]:
    """A launch that brings the image to channels-last with packed channels, and the result."""
    channels, dtype = packed_channels(conv.channels), conv.image.dtype
    batch, _, height, width = conv.image_ref.view.shape
    pixels = batch * height * width
    piece = _SMALL_PIECE if channels == _SMALL_PIECE else _PIECE
    result = TensorArg(lowering.scratch(pixels * channels * dtype.size), writes=True)
    values = {**image_values(conv.image_ref, conv.image_ref.view.shape), "pixels": pixels}
    struct = ParamStruct("Params", tuple(("int", name) for name in values))
    macros = {
        "a_t": CUDA.storage[dtype.name],
        "PIECE": piece,
        "PIECES": channels // piece,
        "CHANNELS": conv.channels,
    }
    launch = Launch(
        label=f"channels of {conv.image.name}",
        kernel=assemble("pack_channels", struct, macros, ""),
        args=(_argument(conv.image, conv.image_ref), result),
        params=struct.pack(values),
        grid=(-(-pixels * (channels // piece) // _PACK_THREADS), 1, 1),
        block=(_PACK_THREADS, 1, 1),
        nbytes=pixels * (channels + conv.channels) * dtype.size,
    )
    return launch, TensorArg(result.tensor)


def _lower_tiled(conv: _Convolution, group: Group, lowering: Lowering, image: TensorArg) -> Launch:
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    batch, _, out_height, out_width = group.shape
    rows, channels = batch * out_height * out_width, packed_channels(conv.channels)
    common = channels * prod(conv.weight_ref.view.shape[2:])
    tiling = choose_tiling(rows, conv.outputs, common, conv.groups)
    tiles_m, tiles_n = -(-rows // tiling.rows), -(-conv.outputs // tiling.columns)
    tiles = tiles_m * tiles_n * conv.groups
    macros = {
        **tiling.macros(tiles),
        **_geometry(group, conv, channels),
        "tile_t": CUDA.storage[conv.image.dtype.name],
        "A_ALONG_K": 1,
        "B_ALONG_K": 1,
        "B_CONSTANT": int(conv.weight.source is None),
        "A_PIECE": _SMALL_PIECE if channels == _SMALL_PIECE else _PIECE,
    }
    values = {
        **image_values(conv.image_ref, group.shape),
        "pixel_stride": channels * conv.groups,
        "rows": rows,
        "columns": conv.outputs,
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
    }
    weight = _argument(conv.weight, conv.weight_ref)
    partial = tiles * tiling.splits * tiling.rows * tiling.columns * 4
    parts = TensorArg(lowering.scratch(partial), writes=True) if tiling.splits > 1 else weight
    return anchor_launch(
        "conv2d",
        group,
        lowering,
        found,
        size=pack_size(group, found.operands, conv.outputs),
        inputs=(image, weight, parts),
        values=values,
        macros=macros,
        flops=2 * prod(group.shape) * conv.products,
        blocks=tiles,
        threads=tiling.threads,
        splits=tiling.splits,
        shared_bytes=tiling.shared_bytes,
        parts=TILE_FILES,
    )


def _lower_plain(conv: _Convolution, group: Group, lowering: Lowering) -> Launch:
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    w_output, w_channel, w_y, w_x = conv.weight_ref.view.strides
    values = {
        **image_values(conv.image_ref, group.shape),
        "results": prod(group.shape),
        "outputs": group.shape[1],
        "group_outputs": conv.outputs,
        "w_output": w_output,
        "w_channel": w_channel,
        "w_y": w_y,
        "w_x": w_x,
    }
    macros = {
        **_geometry(group, conv, conv.channels),
        "a_t": CUDA.storage[conv.image.dtype.name],
        "b_t": CUDA.storage[conv.weight.dtype.name],
    }
    return anchor_launch(
        "conv2d_plain",
        group,
        lowering,
        found,
        size=1,
        inputs=(_argument(conv.image, conv.image_ref), _argument(conv.weight, conv.weight_ref)),
        values=values,
        macros=macros,
        flops=2 * prod(group.shape) * conv.products,
        blocks=-(-prod(group.shape) // _PLAIN_THREADS),
        threads=_PLAIN_THREADS,
    )
