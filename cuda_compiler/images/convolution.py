"""Lowers convolutions: products of matrices on tensor cores, or one result a thread where channels are few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from cuda_compiler.anchors import Epilogue, KernelText, LaunchShape, anchor_launch, anchor_source
from cuda_compiler.dialect import CUDA
from cuda_compiler.images.image_packing import (
    CHUNK,
    IMAGE_DIMS,
    chunks_follow_steps,
    is_packed_image,
    is_packed_weight,
    pack_image,
    packed_weight,
)
from cuda_compiler.images.overlaps import fits_overlaps, lower_overlaps
from cuda_compiler.images.windows import fits_windows, lower_windows
from cuda_compiler.packing import pack_size, resolve_anchor
from cuda_compiler.tiles.lowering import bytes_of_a_result, close_tilings, option_of, partial_argument, product_function
from cuda_compiler.tiles.tiling import Tiling
from cuda_compiler.tiles.wgmma import WARPGROUPS
from npu_compiler.artifact.plan import Argument, CallOption, KernelCall, Step, choice_of
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.target import Lowering
from npu_compiler.tensor.expr import Ref
from npu_compiler.tensor.trace import Anchor, TracedTensor

__all__ = ["lower_conv2d", "takes_added_convolution"]

_FEW_OUTPUTS = 8  # in a group: fewer waste most of a tile
_PLAIN_THREADS = 128


@dataclass(frozen=True)
class _Convolution:
    """A convolution whose operands are resolved.

    Attributes:
        image, weight: The operands [N, C, H, W] and [O, C / groups, KH, KW].
        image_ref, weight_ref: Where these lie.
        attrs: Stride, padding, dilation and groups of channels.
    """

    image: TracedTensor
    weight: TracedTensor
    image_ref: Ref
    weight_ref: Ref
    attrs: Mapping[str, Any]

    @classmethod
    def of(cls, source: Anchor, lowering: Lowering) -> _Convolution:
        image, weight = source.operands
        return cls(lowering.tensors[image.tensor], lowering.tensors[weight.tensor], image, weight, source.attrs)

    @property
    def groups(self) -> int:
        """Groups of channels."""
        return int(self.attrs["groups"])

    @property
    def outputs(self) -> int:
        """Channels of the result in one group."""
        return self.weight_ref.view.shape[0] // self.groups

    @property
    def depth(self) -> int:
        """Extent of the common dimension, its taps filled up."""
        return prod(packed_weight(self.weight_ref.view.shape)[1:])

    @property
    def channels(self) -> int:
        """Channels of the image in one group."""
        return self.weight_ref.view.shape[1]

    @property
    def products(self) -> int:
        """Multiplications for one result."""
        return prod(self.weight_ref.view.shape[1:])


def lower_conv2d(group: Group, lowering: Lowering) -> list[Step]:
    """One launch, chosen by the device, and one before it where the image's channels must be packed.

    Raises:
        OpRefusal: A tensor is too large.
    """
    found = _Convolution.of(anchor_source(group), lowering)
    if not _fits_tiles(found) or not chunks_follow_steps(
        found.channels, found.attrs["stride"][1], found.attrs["dilation"][1]
    ):
        return [_lower_plain(found, group, lowering)]
    if is_packed_image(found.image_ref, found.channels):
        given = _argument(found.image, found.image_ref)
        return choice_of(_tiled_options(found, group, lowering, given, _geometry(found)))
    packing, packed, geometry = pack_image(found.image, found.image_ref, _geometry(found), lowering)
    tiled = _tiled_options(found, group, lowering, packed, geometry)
    if not fits_windows(group, lowering):
        return [packing, *choice_of(tiled)]
    packed_ways = (CallOption(way.requires, (packing, *way.calls)) for way in tiled)
    return choice_of([CallOption(WARPGROUPS, (lower_windows(group, lowering),)), *packed_ways])


def takes_added_convolution(group: Group, other: Group) -> bool:
    """Whether another group's convolution can be added to that of a group before its epilogue."""
    return all(_reads_chunks(anchor) for anchor in (group.anchor, other.anchor))


def _reads_chunks(anchor: TracedTensor | None) -> bool:
    """Whether an anchor is a convolution, without groups, that takes its operands to tensor cores as they are."""
    if anchor is None or not isinstance(anchor.source, Anchor) or anchor.source.kind != "conv2d":
        return False
    image, weight = anchor.source.operands
    outputs, channels = weight.view.shape[:2]
    whole = anchor.source.attrs["groups"] == 1 and outputs >= _FEW_OUTPUTS and anchor.dtype in (FLOAT16, BFLOAT16)
    return whole and is_packed_weight(weight) and is_packed_image(image, channels)


def _image_values(ref: Ref, out: tuple[int, ...]) -> dict[str, int]:
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


def _summed(conv: _Convolution, group: Group, lowering: Lowering) -> list[_Convolution]:
    """The group's convolution, and the one that is added to it, if any."""
    return [conv, *([] if group.added is None else [_Convolution.of(group.added, lowering)])]


def _arguments(conv: _Convolution) -> tuple[Argument, Argument]:
    return _argument(conv.image, conv.image_ref), _argument(conv.weight, conv.weight_ref)


def _argument(tensor: TracedTensor, ref: Ref) -> Argument:
    return Argument(tensor.index, ref.view.offset * tensor.dtype.size)


def _geometry(conv: _Convolution) -> dict[str, int]:
    """What the kernels know of the image and of the taps when they are compiled."""
    _, channels, taps_y, taps_x = packed_weight(conv.weight_ref.view.shape)
    names = (("STEP", "stride"), ("PAD", "padding"), ("DILATION", "dilation"))
    pairs = {f"{name}_{axis}": conv.attrs[key][i] for name, key in names for i, axis in enumerate("YX")}
    return {
        **pairs,
        "TAPS_Y": taps_y,
        "TAPS_X": taps_x,
        "CHANNELS": channels,
        "PIXEL_STRIDE": channels * conv.groups,
        "HEIGHT": conv.image_ref.view.shape[2],
        "WIDTH": conv.image_ref.view.shape[3],
    }


def _struct(name: str, geometry: Mapping[str, int]) -> str:
    """A type that holds a geometry's numbers."""
    numbers = ", ".join(f"{key} = {value}" for key, value in geometry.items())
    return f"struct {name} {{\n    static constexpr int {numbers};\n}};"


def _tiled_options(
    conv: _Convolution, group: Group, lowering: Lowering, image: Argument, geometry: Mapping[str, int]
) -> list[CallOption]:
    batch, _, out_height, out_width = group.shape
    depth = sum(part.depth for part in _summed(conv, group, lowering))
    # Windows of one chunk overlap and come through the level-1 cache, which large tiles would leave no room for.
    large = geometry["CHANNELS"] != CHUNK
    moved = bytes_of_a_result(group, lowering)
    rows = batch * out_height * out_width
    tilings = close_tilings(rows, conv.outputs, depth, conv.groups, moved, warpgroups=large)
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    fused = Epilogue(group, found, pack_size(group, found.operands, conv.outputs))
    added = _summed(conv, group, lowering)[1:]
    structs = [_struct("Image", geometry), *(_struct("AddedImage", _geometry(part)) for part in added)]
    given = (conv, fused, lowering, image, "\n".join(structs))
    ways = [option_of(_lower_tiled(*given, tiling), tiling) for tiling in tilings]
    if fits_overlaps(group, lowering):
        ways.insert(0, CallOption(WARPGROUPS, (lower_overlaps(group, lowering),)))
    return ways


def _lower_tiled(
    conv: _Convolution,
    fused: Epilogue,
    lowering: Lowering,
    image: Argument,
    structs: str,
    tiling: Tiling,
) -> KernelCall:
    group = fused.group
    batch, _, out_height, out_width = group.shape
    rows = batch * out_height * out_width
    summed = _summed(conv, group, lowering)
    steps = sum(-(-part.depth // tiling.depth) for part in summed)
    tiles_m, tiles_n = -(-rows // tiling.rows), -(-conv.outputs // tiling.columns)
    tiles = tiles_m * tiles_n * conv.groups
    macros = {
        **tiling.macros(tiles, steps, tiling.panel(tiles_m, tiles_n)),
        "ADDED": len(summed) - 1,
        "tile_t": CUDA.storage[conv.image.dtype.name],
        "A_ALONG_K": 1,
        "B_ALONG_K": 1,
        "B_CONSTANT": int(conv.weight.source is None),
        "COLUMNS": conv.outputs,
        "OUT_HEIGHT": out_height,
        "OUT_WIDTH": out_width,
    }
    weight = _argument(conv.weight, conv.weight_ref)
    added = [argument for part in summed[1:] for argument in _arguments(part)]
    return anchor_launch(
        KernelText(
            "conv2d",
            values={"rows": rows, "tiles_m": tiles_m},
            macros=macros,
            generated=f"{structs}\n{product_function(tiling, conv.image.dtype)}",
            parts=tiling.files,
        ),
        LaunchShape(
            blocks=tiling.grid(tiles), threads=tiling.threads, splits=tiling.splits, shared_bytes=tiling.shared_bytes
        ),
        fused,
        lowering,
        inputs=(image, weight, *added, partial_argument(tiling, tiles, weight, lowering)),
        flops=2 * prod(group.shape) * sum(part.products for part in summed),
    )


def _lower_plain(conv: _Convolution, group: Group, lowering: Lowering) -> KernelCall:
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    w_output, w_channel, w_y, w_x = conv.weight_ref.view.strides
    values = {
        **_image_values(conv.image_ref, group.shape),
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
        **_geometry(conv),
        "TAPS_Y": taps_y,
        "TAPS_X": taps_x,
        "CHANNELS": conv.channels,
        "a_t": CUDA.storage[conv.image.dtype.name],
        "b_t": CUDA.storage[conv.weight.dtype.name],
    }
    return anchor_launch(
        KernelText("conv2d_plain", values=values, macros=macros),
        LaunchShape(blocks=-(-prod(group.shape) // _PLAIN_THREADS), threads=_PLAIN_THREADS),
        Epilogue(group, found, 1),
        lowering,
        inputs=(_argument(conv.image, conv.image_ref), _argument(conv.weight, conv.weight_ref)),
        flops=2 * prod(group.shape) * conv.products,
    )
