"""Lowers pooling."""

from __future__ import annotations

from math import prod

from cuda_compiler.anchors import anchor_launch, anchor_source
from cuda_compiler.convolution import IMAGE_DIMS, image_values
from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import PACK_SIZES, Positions, pack_size, resolve_anchor
from npu_compiler.codegen.grouping import Group
from npu_compiler.codegen.operands import TensorArg
from npu_compiler.codegen.target import Launch, Lowering
from npu_compiler.expr import Ref
from npu_compiler.trace import Anchor

__all__ = ["lower_pool2d"]

_THREADS = 128
_DIVISORS = {
    "max": "1",
    "sum": "1",
    "mean": "(rows.padded * columns.padded)",
    "mean_valid": "count",
    "adaptive": "count",
}


def lower_pool2d(group: Group, lowering: Lowering) -> list[Launch]:
    """One thread a pack of channels of an output pixel.

    Raises:
        OpRefusal: A tensor is too large.
    """
    source = anchor_source(group)
    (ref,) = source.operands
    image = lowering.tensors[ref.tensor]
    found = resolve_anchor(group, lowering, IMAGE_DIMS)
    size = _pack_size(group, found, ref)
    batch, channels, out_height, out_width = group.shape
    pixels, packs = batch * out_height * out_width, channels // size
    values = {
        **image_values(ref, group.shape),
        "pixels": pixels,
        "packs": packs,
        **_window(source),
    }
    macros = {
        "a_t": CUDA.storage[image.dtype.name],
        "MAXIMUM": int(source.attrs["reduction"] == "max"),
        "ADAPTIVE": int(source.attrs["reduction"] == "adaptive"),
        "DIVISOR": _DIVISORS[source.attrs["reduction"]],
    }
    return [
        anchor_launch(
            "pool2d",
            group,
            lowering,
            found,
            size=size,
            inputs=[TensorArg(image.index, ref.view.offset * image.dtype.size)],
            values=values,
            macros=macros,
            flops=prod(group.shape) * prod(source.attrs.get("kernel", (1, 1))),
            blocks=-(-pixels * packs // _THREADS),
            threads=_THREADS,
        )
    ]


def _window(source: Anchor) -> dict[str, int]:
    """The geometry of the sliding window; an adaptive pooling has none."""
    names = (("taps", "kernel"), ("step", "stride"), ("pad", "padding"), ("dilation", "dilation"))
    return {f"{name}_{axis}": source.attrs.get(key, (1, 1))[i] for name, key in names for i, axis in enumerate("yx")}


def _pack_size(group: Group, found: Positions, ref: Ref) -> int:
    """Channels of a thread: those that the epilogue stores together, where the image can be read that way too."""
    size = pack_size(group, found.operands, group.shape[1])
    strides = (*ref.view.strides[:1], *ref.view.strides[2:], ref.view.offset)
    fits = ref.view.strides[1] == 1 and all(stride % size == 0 for stride in strides)
    return size if size in PACK_SIZES and fits else 1
