"""What convolution and pooling kernels have in common: parameters that say where images lie and how windows slide."""

from __future__ import annotations

from math import prod

from metal_compiler.tiles.tiling import GROUP
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.windows import Windows

__all__ = ["IMAGE_PARAMS", "THREADS", "WINDOW_PARAMS", "channels_per_thread", "thread_groups", "window_values"]

IMAGE_PARAMS = "out_height, out_width, height, width, image_stride, y_stride, x_stride, channel_stride"
WINDOW_PARAMS = "kernel_height, kernel_width, step_y, step_x, pad_y, pad_x, dilation_y, dilation_x"
THREADS = 64


def channels_per_thread(image: Operand) -> int:
    """How many neighbouring channels of an image [N, C, H, W] a thread of the untiled kernels handles."""
    return GROUP if image.strides[1] == 1 and image.readable(1) % GROUP == 0 else 1


def window_values(windows: Windows) -> dict[str, int]:
    """The kernel's parameters `WINDOW_PARAMS`."""
    pairs = (windows.kernel, windows.stride, windows.padding, windows.dilation)
    return dict(zip(WINDOW_PARAMS.split(", "), (value for pair in pairs for value in pair), strict=True))


def thread_groups(shape: tuple[int, ...], per_thread: int) -> tuple[int, dict[str, int]]:
    """Threadgroups of an untiled kernel for a result [N, C, H, W], and its parameters ``pixels`` and ``chunks``."""
    pixels, chunks = shape[0] * prod(shape[2:]), ceil_div(shape[1], per_thread)
    return ceil_div(pixels * chunks, THREADS), {"pixels": pixels, "chunks": chunks}
