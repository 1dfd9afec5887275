"""Lowers convolutions: products of matrices on tensor cores, or one result a thread where channels are few."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from cuda_compiler.anchors import TILE_FILES, anchor_launch, anchor_source
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import pack_size, resolve_anchor
from cuda_compiler.tiles import choose_tiling
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.target import Launch, Lowering
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.expr import Ref
from npu_compiler.trace import TracedTensor

__all__ = ["IMAGE_DIMS", "image_values", "lower_conv2d"]

IMAGE_DIMS = ((), (0, 2, 3), (1,))  # a row is a pixel of [N, C, H, W], a column a channel
_CHUNK = 8  # elements of 16 bytes
_FEW_CHANNELS = 8  # in a group: fewer results or channels than this waste most of a tile
_THREADS = 128


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
    common: int


def lower_conv2d(group: Group, lowering: Lowering) -> list[Launch]:
    """One launch.

    Raises:
        OpRefusal: A tensor is too large.
    """
    source = anchor_source(group)
    image, weight = source.operands
    outputs, *taps = weight.view.shape
    groups = source.attrs["groups"]
    tensors = lowering.tensors[image.tensor], lowering.tensors[weight.tensor]
    found = _Convolution(*tensors, image, weight, groups, outputs // groups, prod(taps))
    if _fits_tiles(found):
        return [_lower_tiled(found, group, lowering)]
    return [_lower_plain(found, group, lowering)]


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
    enough = found.outputs >= _FEW_CHANNELS and (found.common >= 2 * _CHUNK)
    return half and enough and _is_packed_weight(found.weight_ref)


def _is_packed_weight(ref: Ref) -> bool:
    """Whether a weight lies as [O, KH, KW, I] without gaps."""
    _, channels, height, width = ref.view.shape
    expected = (channels * height * width, 1, width * channels, channels)
    pairs = zip(ref.view.shape, ref.view.strides, expected, strict=True)
    return all(n == 1 or stride == wanted for n, stride, wanted in pairs)


def _geometry(group: Group, found: _Convolution) -> dict[str, object]:
    attrs = anchor_source(group).attrs
    _, channels, taps_y, taps_x = found.weight_ref.view.shape
    names = (("STEP", "stride"), ("PAD", "padding"), ("DILATION", "dilation"))
    pairs = {f"{name}_{axis}": attrs[key][i] for name, key in names for i, axis in enumerate("YX")}
    return {"TAPS_Y": taps_y, "TAPS_X": taps_x, "CHANNELS": channels, **pairs}


def _is_chunked_image(ref: Ref, channels: int) -> bool:
    """Whether pixels follow each other without gaps between rows or images, each from a 16-byte border on."""
    image_stride, channel_stride, y_stride, x_stride = ref.view.strides
    _, _, height, width = ref.view.shape
    pixel = x_stride if width > 1 else y_stride if height > 1 else image_stride
    rows = (width == 1 or x_stride == pixel) and (height == 1 or y_stride == width * pixel)
    images = ref.view.shape[0] == 1 or image_stride == height * width * pixel
    aligned = channels % _CHUNK == 0 and pixel % _CHUNK == 0 and ref.view.offset % _CHUNK == 0
    return rows and images and aligned and (channel_stride == 1)


def _argument(tensor: TracedTensor, ref: Ref) -> TensorArg:
    return TensorArg(tensor.index, ref.view.offset * tensor.dtype.size)


def _lower_tiled(conv: _Convolution, group: Group, lowering: Lowering) -> Launch:
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    batch, _, out_height, out_width = group.shape
    rows = batch * out_height * out_width
    tiling = choose_tiling(rows, conv.outputs, conv.common, conv.groups)
    tiles_m, tiles_n = -(-rows // tiling.rows), -(-conv.outputs // tiling.columns)
    tiles = tiles_m * tiles_n * conv.groups
    channels = conv.weight_ref.view.shape[1]
    chunked = _is_chunked_image(conv.image_ref, channels)
    macros = {
        **tiling.macros(tiles),
        **_geometry(group, conv),
        "tile_t": CUDA.storage[conv.image.dtype.name],
        "A_ALONG_K": 1,
        "B_ALONG_K": 1,
        "A_CHUNK": _CHUNK if chunked else 1,
        "COMMON_CHUNKS": int(conv.common % _CHUNK == 0 and conv.weight_ref.view.offset % _CHUNK == 0),
    }
    image = image_values(conv.image_ref, group.shape)
    values = {
        **image,
        "pixel_stride": image["x_stride"] if image["width"] > 1 else channels * conv.groups,
        "rows": rows,
        "columns": conv.outputs,
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
    }
    arguments = [_argument(conv.image, conv.image_ref), _argument(conv.weight, conv.weight_ref)]
    partial = tiles * tiling.splits * tiling.rows * tiling.columns * 4
    arguments.append(TensorArg(lowering.scratch(partial), writes=True) if tiling.splits > 1 else arguments[0])
    return anchor_launch(
        "conv2d",
        group,
        lowering,
        found,
        size=pack_size(group, found.operands, conv.outputs),
        inputs=arguments,
        values=values,
        macros=macros,
        flops=2 * prod(group.shape) * conv.common,
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
        **_geometry(group, conv),
        "a_t": CUDA.storage[conv.image.dtype.name],
        "b_t": CUDA.storage[conv.weight.dtype.name],
    }
    return anchor_launch(
        "conv2d_plain",
        group,
        lowering,
        found,
        size=1,
        inputs=[_argument(conv.image, conv.image_ref), _argument(conv.weight, conv.weight_ref)],
        values=values,
        macros=macros,
        flops=2 * prod(group.shape) * conv.common,
        blocks=-(-prod(group.shape) // _THREADS),
        threads=_THREADS,
    )
