"""Lowers pooling."""

from __future__ import annotations

from math import prod

from cuda_compiler.anchors import Epilogue, KernelText, LaunchShape, anchor_launch, anchor_source
from cuda_compiler.dialect import CUDA
from cuda_compiler.images.image_packing import IMAGE_DIMS
from cuda_compiler.packing import PACK_SIZES, Positions, pack_size, resolve_anchor
from cuda_compiler.tiles.tiling import MULTIPROCESSORS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.target import Lowering
from npu_compiler.tensor.expr import Ref
from npu_compiler.tensor.trace import Anchor

__all__ = ["lower_pool2d"]

_THREADS = 128
_DIVISORS = {
    "max": "1",
    "sum": "1",
    "mean": "(rows.padded * columns.padded)",
    "mean_valid": "((rows.end - rows.start) * (columns.end - columns.start))",
    "adaptive": "(rows.padded * columns.padded)",
}
_PAIR_TYPES = {FLOAT16: '"f16x2"', BFLOAT16: '"bf16x2"'}
_BUSY_THREADS = 1024  # of a multiprocessor
_MAX_UNROLLED = 64  # pixels that a thread's unrolled loops read


def lower_pool2d(group: Group, lowering: Lowering) -> list[KernelCall]:
    """One thread a pack of channels of one or several output pixels.

    Raises:
        OpRefusal: A tensor is too large.
    """
    source = anchor_source(group)
    (ref,) = source.operands
    image = lowering.tensors[ref.tensor]
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    size = _pack_size(group, found, ref)
    along_y, along_x = _along(group, size)
    batch, channels, out_height, out_width = group.shape
    groups, packs = batch * -(-out_height // along_y) * -(-out_width // along_x), channels // size
    macros = {
        **_geometry(group),
        "a_t": CUDA.storage[image.dtype.name],
        "PACKS": packs,
        "ALONG_Y": along_y,
        "ALONG_X": along_x,
        "MAXIMUM": int(source.attrs["reduction"] == "max"),
        "ADAPTIVE": int(source.attrs["reduction"] == "adaptive"),
        "DIVISOR": _DIVISORS[source.attrs["reduction"]],
    }
    if source.attrs["reduction"] == "max" and image.dtype in _PAIR_TYPES and size > 1:
        macros["PAIR_TYPE"] = _PAIR_TYPES[image.dtype]
    return [
        anchor_launch(
            KernelText("pool2d", values={"groups": groups}, macros=macros),
            LaunchShape(blocks=-(-groups * packs // _THREADS), threads=_THREADS),
            Epilogue(group, found, size),
            lowering,
            inputs=[Argument(image.index, ref.view.offset * image.dtype.size)],
            flops=prod(group.shape) * prod(source.attrs.get("kernel", (1, 1))),
        )
    ]


def _along(group: Group, size: int) -> tuple[int, int]:
    """Output pixels of a thread along y and x: two where windows overlap and there is work for all threads."""
    source = anchor_source(group)
    if source.attrs["reduction"] == "adaptive":
        return 1, 1
    spans = _span(source, 0, 2), _span(source, 1, 1)
    overlapping = source.attrs["kernel"][0] > source.attrs["stride"][0]
    enough = prod(group.shape) // size >= 2 * MULTIPROCESSORS * _BUSY_THREADS
    return (2, 1) if overlapping and enough and prod(spans) <= _MAX_UNROLLED else (1, 1)


def _span(source: Anchor, axis: int, along: int) -> int:
    """Lines or columns that the windows of neighbouring pixels reach over."""
    kernel, stride, dilation = (source.attrs[name][axis] for name in ("kernel", "stride", "dilation"))
    span: int = (along - 1) * stride + (kernel - 1) * dilation + 1
    return span


def _geometry(group: Group) -> dict[str, object]:
    """What the kernel knows of the image and of the sliding window; an adaptive pooling has none."""
    source = anchor_source(group)
    (ref,) = source.operands
    image_stride, channel_stride, y_stride, x_stride = ref.view.strides
    names = (("TAPS", "kernel"), ("STEP", "stride"), ("PAD", "padding"), ("DILATION", "dilation"))
    window = {f"{name}_{axis}": source.attrs.get(key, (1, 1))[i] for name, key in names for i, axis in enumerate("YX")}
    unrolled = source.attrs["reduction"] != "adaptive" and _span(source, 0, 2) * _span(source, 1, 1) <= _MAX_UNROLLED
    return {
        **window,
        "UNROLL_Y": _MAX_UNROLLED if unrolled else 1,
        "UNROLL_X": _MAX_UNROLLED if unrolled else 4,
        "HEIGHT": ref.view.shape[2],
        "WIDTH": ref.view.shape[3],
        "OUT_HEIGHT": group.shape[2],
        "OUT_WIDTH": group.shape[3],
        "IMAGE_STRIDE": image_stride,
        "CHANNEL_STRIDE": channel_stride,
        "Y_STRIDE": y_stride,
        "X_STRIDE": x_stride,
    }


def _pack_size(group: Group, found: Positions, ref: Ref) -> int:
    """Channels of a thread: those that the epilogue stores together, where the image can be read that way too."""
    size = pack_size(group, found.operands, group.shape[1])
    strides = (*ref.view.strides[:1], *ref.view.strides[2:], ref.view.offset)
    fits = ref.view.strides[1] == 1 and all(stride % size == 0 for stride in strides)
    return size if size in PACK_SIZES and fits else 1
