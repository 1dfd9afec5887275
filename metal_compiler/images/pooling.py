"""Lowers pooling: a thread reduces the windows of a few neighbouring channels."""

from __future__ import annotations

from metal_compiler.anchors import single_launch
from metal_compiler.dialect import METAL
from metal_compiler.images.geometry import (
    IMAGE_PARAMS,
    THREADS,
    WINDOW_PARAMS,
    channels_per_thread,
    thread_groups,
    window_values,
)
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.pooling import Pooling
from npu_compiler.lowering.problems.windows import image_values
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["POOL2D", "lower_pool2d"]

POOL2D = KernelTemplate(
    "pool2d",
    params=f"int pixels, chunks, channels, {IMAGE_PARAMS}, {WINDOW_PARAMS}",
    macros="a_t CHANNELS MAXIMUM ADAPTIVE DIVISOR",
    inputs="image",
    threads=THREADS,
    files="store.metal",
)


@lowering_of(Pooling)
def lower_pool2d(pool: Pooling, group: Group, lowering: Lowering) -> list[KernelCall]:
    """Pooling of an image in any layout."""
    image, per_thread = pool.image, channels_per_thread(pool.image)
    groups, counts = thread_groups(pool.shape, per_thread)
    launch = Launch(
        POOL2D,
        grid=(groups, 1, 1),
        values={
            **counts, "channels": pool.shape[1], **image_values(image, pool.shape), **window_values(pool.windows),
        },
        macros={
            "a_t": METAL.storage[image.dtype.name],
            "CHANNELS": per_thread,
            "MAXIMUM": int(pool.maximum),
            "ADAPTIVE": int(pool.adaptive),
            "DIVISOR": pool.divisor.value,
        },
        inputs=pool.arguments,
        flops=pool.flops,
    )  # fmt: skip
    return [single_launch(launch, group, lowering)]
