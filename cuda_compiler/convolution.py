"""Lowers convolutions: products of matrices on tensor cores, or one result a thread where channels are few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from cuda_compiler.anchors import anchor_launch, anchor_source
from cuda_compiler.dialect import CUDA
from cuda_compiler.image_packing import (
    CHUNK,
    chunks_follow_steps,
    is_packed_image,
    is_packed_weight,
    pack_image,
    packed_weight,
)
from cuda_compiler.packing import pack_size, resolve_anchor
from cuda_compiler.tiled import bytes_of_a_result, first_on_warpgroups, partial_argument, product_function
from cuda_compiler.tiles import Tiling, choose_tiling
from cuda_compiler.warpgroups import choose_warpgroup_tiling
from cuda_compiler.window_convolution import fits_windows, lower_windows
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.target import Choice, Emitted, Launch, Lowering, Option
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.expr import Ref
from npu_compiler.trace import TracedTensor

__all__ = ["IMAGE_DIMS", "image_values", "lower_conv2d"]

IMAGE_DIMS = ((), (0, 2, 3), (1,))  # a row is a pixel of [N, C, H, W], a column a channel
_FEW_OUTPUTS = 8  # in a group: fewer waste most of a tile
_PLAIN_THREADS = 128


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


def lower_conv2d(group: Group, lowering: Lowering) -> list[Emitted]:
    """One launch, chosen by the device, and one before it where the image's channels must be packed.

    Raises:
        OpRefusal: A tensor is too large.
    """
    source = anchor_source(group)
    image, weight = source.operands
    groups = source.attrs["groups"]
    tensors = lowering.tensors[image.tensor], lowering.tensors[weight.tensor]
    found = _Convolution(*tensors, image, weight, groups, weight.view.shape[0] // groups)
    if not _fits_tiles(found) or not chunks_follow_steps(
        found.channels, source.attrs["stride"][1], source.attrs["dilation"][1]
    ):
        return [_lower_plain(found, group, lowering)]
    if is_packed_image(found.image_ref, found.channels):
        given = _argument(found.image, found.image_ref)
        return [_choose_tiles(found, group, lowering, given, _geometry(group, found))]
    packing, packed, geometry = pack_image(found.image, found.image_ref, _geometry(group, found), lowering)
    tiled = _choose_tiles(found, group, lowering, packed, geometry)
    if not fits_windows(group, lowering):
        return [packing, tiled]
    ways = tiled.options if isinstance(tiled, Choice) else (Option("", (tiled,)),)
    packed_ways = (Option(way.requires, (packing, *way.launches)) for way in ways)
    return [Choice((Option("sm_90a", (lower_windows(group, lowering),)), *packed_ways))]


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
    whole_chunks = found.groups == 1 or found.channels % CHUNK == 0
    return half and whole_chunks and found.outputs >= _FEW_OUTPUTS and is_packed_weight(found.weight_ref)


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


def _choose_tiles(
    conv: _Convolution, group: Group, lowering: Lowering, image: TensorArg, geometry: Mapping[str, int]
) -> Launch | Choice:
    batch, _, out_height, out_width = group.shape
    rows, depth = batch * out_height * out_width, prod(packed_weight(conv.weight_ref.view.shape)[1:])
    sizes = rows, conv.outputs, depth, conv.groups
    general = _lower_tiled(conv, group, lowering, image, geometry, choose_tiling(*sizes))
    if geometry["CHANNELS"] == CHUNK:  # its windows overlap and come through the level-1 cache: no room for large tiles
        return general
    tiling = choose_warpgroup_tiling(*sizes, bytes_of_a_result(group, lowering))
    if tiling is None:
        return general
    return first_on_warpgroups(_lower_tiled(conv, group, lowering, image, geometry, tiling), [general])


def _lower_tiled(
    conv: _Convolution,
    group: Group,
    lowering: Lowering,
    image: TensorArg,
    geometry: Mapping[str, int],
    tiling: Tiling,
) -> Launch:
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    batch, _, out_height, out_width = group.shape
    rows, depth = batch * out_height * out_width, prod(packed_weight(conv.weight_ref.view.shape)[1:])
    tiles_m, tiles_n = -(-rows // tiling.rows), -(-conv.outputs // tiling.columns)
    tiles = tiles_m * tiles_n * conv.groups
    macros = {
        **tiling.macros(tiles, -(-depth // tiling.depth), tiling.panel(tiles_m, tiles_n)),
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
    return anchor_launch(
        "conv2d",
        group,
        lowering,
        found,
        size=pack_size(group, found.operands, conv.outputs),
        inputs=(image, weight, partial_argument(tiling, tiles, weight, lowering)),
        values={"rows": rows, "tiles_m": tiles_m},
        macros=macros,
        flops=2 * prod(group.shape) * conv.products,
        blocks=tiles,
        threads=tiling.threads,
        splits=tiling.splits,
        shared_bytes=tiling.shared_bytes,
        generated=product_function(tiling, conv.image.dtype),
        parts=tiling.files,
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
