"""Lowers pooling: a thread reduces the windows of a few neighbouring channels."""

from __future__ import annotations

from metal_compiler.anchors import KernelText, anchor_kernel
from metal_compiler.dialect import METAL
from metal_compiler.images.geometry import (
    IMAGE_FIELDS,
    THREADS,
    WINDOW_FIELDS,
    channels_per_thread,
    thread_groups,
    window_values,
)
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.pooling import Pooling
from npu_compiler.lowering.problems.windows import image_values
from npu_compiler.lowering.target import Lowering, lowering_of

__all__ = ["POOL_FIELDS", "lower_pool2d"]

POOL_FIELDS = ("pixels", "chunks", "channels", *IMAGE_FIELDS, *WINDOW_FIELDS)


@lowering_of(Pooling)
def lower_pool2d(pool: Pooling, group: Group, lowering: Lowering) -> list[KernelCall]:
    """Pooling of an image in any layout."""
    image, per_thread = pool.image, channels_per_thread(pool.image)
    definitions = {
        "a_t": METAL.storage[image.dtype.name],
        "CHANNELS": per_thread,
        "MAXIMUM": int(pool.maximum),
        "ADAPTIVE": int(pool.adaptive),
        "DIVISOR": pool.divisor.value,
    }
    text = KernelText("pool2d", 1, POOL_FIELDS, definitions, ("store.metal",))
    kernel = anchor_kernel(text, group, lowering)
    groups, counts = thread_groups(pool.shape, per_thread)
    values = {**counts, "channels": pool.shape[1], **image_values(image, pool.shape), **window_values(pool.windows)}
    return [kernel.launch([image.argument], values, (groups, 1, 1), THREADS, pool.flops)]
