"""Lowers pooling: a thread reduces the windows of a few neighbouring channels."""

from __future__ import annotations

from math import prod

from metal_compiler.anchors import KernelText, anchor_kernel, anchor_of
from metal_compiler.images.geometry import (
    IMAGE_DIMS,
    IMAGE_FIELDS,
    THREADS,
    WINDOW_FIELDS,
    Image,
    thread_groups,
    window_values,
)
from metal_compiler.tiles.tiling import check_size
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.dialect import Dialect
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.target import Lowering

__all__ = ["POOL_FIELDS", "lower_pool2d"]

POOL_FIELDS = ("pixels", "chunks", "channels", *IMAGE_FIELDS, *WINDOW_FIELDS)

_VALID = "((rows.end - rows.start) * (columns.end - columns.start))"
_PADDED = "(rows.padded * columns.padded)"
_DIVISORS = {"max": "1", "sum": "1", "mean": _PADDED, "mean_valid": _VALID, "adaptive": _VALID}
"""What the sum over a window is divided by, in the terms of the kernel."""


def lower_pool2d(group: Group, lowering: Lowering, dialect: Dialect) -> list[KernelCall]:
    """Pooling of an image in any layout.

    Raises:
        OpRefusal: A tensor is too large.
    """
    anchor = anchor_of(group)
    (ref,), attrs = anchor.operands, anchor.attrs
    image = Image.of(ref, lowering.tensors[ref.tensor])
    check_size(image.tensor)
    reduction = attrs["reduction"]
    per_thread = image.channels_per_thread()
    definitions = {
        "a_t": dialect.storage[image.tensor.dtype.name],
        "CHANNELS": per_thread,
        "MAXIMUM": int(reduction == "max"),
        "ADAPTIVE": int(reduction == "adaptive"),
        "DIVISOR": _DIVISORS[reduction],
    }
    text = KernelText("pool2d", 1, POOL_FIELDS, definitions, ("store.metal",))
    kernel = anchor_kernel(text, group, lowering, dialect, IMAGE_DIMS)
    groups, counts = thread_groups(group.shape, per_thread)
    size = image.view.shape[2:]
    if reduction == "adaptive":
        window = tuple(-(-n // out) for n, out in zip(size, group.shape[2:], strict=True))
        windows = window_values((window[0], window[1]), (1, 1), (0, 0), (1, 1))
    else:
        windows = window_values(attrs["kernel"], attrs["stride"], attrs["padding"], attrs["dilation"])
    values = {**counts, "channels": group.shape[1], **image.values(group.shape), **windows}
    flops = prod(group.shape) * windows["kernel_height"] * windows["kernel_width"]
    return [kernel.launch([image.argument], values, (groups, 1, 1), THREADS, flops)]
