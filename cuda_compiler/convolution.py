"""Lowers convolutions: products of matrices on tensor cores, or one result a thread where channels are few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from cuda_compiler.anchors import TILE_FILES, anchor_launch, anchor_source
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import pack_size, resolve_anchor
from cuda_compiler.skeleton import assemble
from cuda_compiler.tiles import choose_tiling
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.operands import MAX_ELEMENTS, TensorArg
from npu_compiler.codegen.params import ParamStruct
from npu_compiler.codegen.target import Launch, Lowering
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.expr import Ref
from npu_compiler.symbolic import OpRefusal
from npu_compiler.trace import TracedTensor

__all__ = ["IMAGE_DIMS", "image_values", "lower_conv2d", "packed_weight"]

IMAGE_DIMS = ((), (0, 2, 3), (1,))  # a row is a pixel of [N, C, H, W], a column a channel
_CHUNK = 8  # elements that are copied at a time: 16 bytes
_FEW_CHANNELS = 4  # of which two neighbouring pixels, or taps, make a chunk
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


def packed_weight(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape [O, I, KH, KW] of a weight whose taps are filled up with zeros to whole chunks."""
    outputs, channels, height, width = shape
    if channels <= _FEW_CHANNELS:
        return outputs, _FEW_CHANNELS, height, -(-width // 2) * 2
    return outputs, -(-channels // _CHUNK) * _CHUNK, height, width


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
        given = _argument(found.image, found.image_ref)
        return [_lower_tiled(found, group, lowering, given, _geometry(group, found))]
    packing, packed, geometry = _pack(found, group, lowering)
    return [packing, _lower_tiled(found, group, lowering, packed, geometry)]


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
    whole_chunks = found.groups == 1 or found.channels % _CHUNK == 0
    return half and whole_chunks and found.outputs >= _FEW_OUTPUTS and _is_packed_weight(found.weight_ref)


def _is_packed_weight(ref: Ref) -> bool:
    """Whether a weight lies as [O, KH, KW, I], with its taps filled up."""
    _, channels, height, width = packed_weight(ref.view.shape)
    expected = (channels * height * width, 1, width * channels, channels)
    pairs = zip(ref.view.shape, ref.view.strides, expected, strict=True)
    return ref.view.offset == 0 and all(n == 1 or stride == wanted for n, stride, wanted in pairs)


def _is_packed_image(ref: Ref, channels: int) -> bool:
    """Whether pixels follow each other without gaps between rows or images, each from a 16-byte border on."""
    image_stride, channel_stride, y_stride, x_stride = ref.view.strides
    batch, total, height, width = ref.view.shape
    followed = (width == 1 or x_stride == total) and (height == 1 or y_stride == width * total)
    followed &= batch == 1 or image_stride == height * width * total
    return followed and channel_stride == 1 and channels % _CHUNK == 0 and ref.view.offset % _CHUNK == 0


def _argument(tensor: TracedTensor, ref: Ref) -> TensorArg:
    return TensorArg(tensor.index, ref.view.offset * tensor.dtype.size)


def _geometry(group: Group, conv: _Convolution) -> dict[str, int]:
    """What the kernels know of the image and of the taps when they are compiled."""
    attrs = anchor_source(group).attrs
    _, channels, taps_y, taps_x = packed_weight(conv.weight_ref.view.shape)
    names = (("STEP", "stride"), ("PAD", "padding"), ("DILATION", "dilation"))
    pairs = {f"{name}_{axis}": attrs[key][i] for name, key in names for i, axis in enumerate("YX")}
    return {
        **pairs,
        "TAPS_Y": taps_y,
        "TAPS_X": taps_x,
        "CHANNELS": channels,
        "PIXEL_STRIDE": channels * conv.groups,
        "HEIGHT": conv.image_ref.view.shape[2],
        "WIDTH": conv.image_ref.view.shape[3],
    }


def _pack(conv: _Convolution, group: Group, lowering: Lowering) -> tuple[Launch, TensorArg, dict[str, int]]:
    """A launch that brings the image to channels-last with filled-up channels, its result, and the geometry of that.

    Raises:
        OpRefusal: The result is too large.
    """
    geometry, first, width = _packed_geometry(_geometry(group, conv))
    channels = packed_weight(conv.weight_ref.view.shape)[1]
    batch, _, height, _ = conv.image_ref.view.shape
    pixels = batch * height * width
    if pixels * channels >= MAX_ELEMENTS:
        raise OpRefusal(
            f"'{conv.image.name}' takes {pixels * channels} elements with {channels} channels, at most 2^31"
        )
    piece = min(channels, _CHUNK)
    result = TensorArg(lowering.scratch(pixels * channels * conv.image.dtype.size), writes=True)
    strides = zip(("image_stride", "channel_stride", "y_stride", "x_stride"), conv.image_ref.view.strides, strict=True)
    values = {**dict(strides), "pixels": pixels}
    macros = {
        "a_t": CUDA.storage[conv.image.dtype.name],
        "PIECE": piece,
        "PIECES": channels // piece,
        "CHANNELS": conv.channels,
        "FIRST": first,
        "PACKED_WIDTH": width,
        "WIDTH": conv.image_ref.view.shape[3],
        "HEIGHT": height,
    }
    struct = ParamStruct("Params", tuple(("int", name) for name in values))
    launch = Launch(
        label=f"channels of {conv.image.name}",
        kernel=assemble("pack_channels", struct, macros, ""),
        args=(_argument(conv.image, conv.image_ref), result),
        params=struct.pack(values),
        grid=(-(-pixels * (channels // piece) // _PACK_THREADS), 1, 1),
        block=(_PACK_THREADS, 1, 1),
        nbytes=(pixels * channels + prod(conv.image_ref.view.shape)) * conv.image.dtype.size,
    )
    return launch, TensorArg(result.tensor), geometry


def _packed_geometry(geometry: Mapping[str, int]) -> tuple[dict[str, int], int, int]:
    """The geometry of a packed image, the pixels of zeros that come before each of its lines, and its width in pixels.

    Where images of few channels are walked two pixels at a time, two pixels become one of twice the channels, and so do
    two taps; a window that begins at an odd pixel begins at an even one when a pixel of zeros comes first.
    """
    channels, width, pad = geometry["CHANNELS"], geometry["WIDTH"], geometry["PAD_X"]
    if channels != _FEW_CHANNELS or (geometry["STEP_X"], geometry["DILATION_X"]) != (2, 1):
        return dict(geometry), 0, width
    first = pad % 2
    pairs = -(-(width + first) // 2)
    paired = {
        "CHANNELS": 2 * channels,
        "PIXEL_STRIDE": 2 * channels,
        "TAPS_X": geometry["TAPS_X"] // 2,
        "STEP_X": 1,
        "PAD_X": (pad - first) // 2,
        "WIDTH": pairs,
    }
    return {**geometry, **paired}, first, 2 * pairs


def _lower_tiled(
    conv: _Convolution, group: Group, lowering: Lowering, image: TensorArg, geometry: Mapping[str, int]
) -> Launch:
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    batch, _, out_height, out_width = group.shape
    rows = batch * out_height * out_width
    tiling = choose_tiling(rows, conv.outputs, prod(packed_weight(conv.weight_ref.view.shape)[1:]), conv.groups)
    tiles_m, tiles_n = -(-rows // tiling.rows), -(-conv.outputs // tiling.columns)
    tiles = tiles_m * tiles_n * conv.groups
    macros = {
        **tiling.macros(tiles),
        **geometry,
        "tile_t": CUDA.storage[conv.image.dtype.name],
        "A_ALONG_K": 1,
        "B_ALONG_K": 1,
        "B_CONSTANT": int(conv.weight.source is None),
        "COLUMNS": conv.outputs,
        "OUT_HEIGHT": out_height,
        "OUT_WIDTH": out_width,
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
        values={"rows": rows, "tiles_m": tiles_m},
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
    _, _, taps_y, taps_x = conv.weight_ref.view.shape
    macros = {
        **_geometry(group, conv),
        "TAPS_Y": taps_y,
        "TAPS_X": taps_x,
        "CHANNELS": conv.channels,
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
