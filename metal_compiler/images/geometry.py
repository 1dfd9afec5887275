"""What convolution and pooling kernels have in common: the geometry of sliding windows over an image."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from metal_compiler.anchors import Dims
from metal_compiler.tiles.tiling import GROUP
from npu_compiler.artifact.plan import Argument
from npu_compiler.tensor.expr import Ref
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import View

__all__ = ["IMAGE_DIMS", "IMAGE_FIELDS", "WINDOW_FIELDS", "Image", "THREADS", "thread_groups", "window_values"]

IMAGE_DIMS: Dims = ((), (0, 2, 3), (1,))
"""A kernel's row is an output pixel of the batch, its column a channel."""

IMAGE_FIELDS = ("out_height", "out_width", "height", "width", "image_stride", "y_stride", "x_stride", "channel_stride")
WINDOW_FIELDS = ("kernel_height", "kernel_width", "step_y", "step_x", "pad_y", "pad_x", "dilation_y", "dilation_x")
THREADS = 64


@dataclass(frozen=True)
class Image:
    """An image [N, C, H, W] that a kernel reads."""

    tensor: TracedTensor
    view: View

    @classmethod
    def of(cls, ref: Ref, tensor: TracedTensor) -> Image:
        return cls(tensor, ref.view)

    @property
    def argument(self) -> Argument:
        return Argument(self.tensor.index, self.view.offset * self.tensor.dtype.size)

    @property
    def alignment(self) -> tuple[int, ...]:
        """What must be multiples of a chunk of channels: where pixels begin."""
        batch, _, y, x = self.view.strides
        return (self.view.offset, batch, y, x)

    @property
    def readable_channels(self) -> int:
        """Channels that may be read at every pixel, padding included."""
        whole = self.view == self.tensor.view and self.view.strides[1] == 1
        return self.tensor.layout.alloc_shape[1] if whole else self.view.shape[1]

    def channels_per_thread(self) -> int:
        """How many neighbouring channels a thread of the untiled kernels handles."""
        return GROUP if self.view.strides[1] == 1 and self.readable_channels % GROUP == 0 else 1

    def values(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The kernel's parameters `IMAGE_FIELDS`, for a result of shape [N, C, H, W]."""
        batch, channel, y, x = self.view.strides
        return {
            "out_height": shape[2], "out_width": shape[3], "height": self.view.shape[2], "width": self.view.shape[3],
            "image_stride": batch, "y_stride": y, "x_stride": x, "channel_stride": channel,
        }  # fmt: skip


def window_values(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> dict[str, int]:
    """The kernel's parameters `WINDOW_FIELDS`; each argument is (vertical, horizontal)."""
    pairs = (kernel, stride, padding, dilation)
    return dict(zip(WINDOW_FIELDS, (value for pair in pairs for value in pair), strict=True))


def thread_groups(shape: tuple[int, ...], per_thread: int) -> tuple[int, dict[str, int]]:
    """Threadgroups of an untiled kernel for a result [N, C, H, W], and its parameters ``pixels`` and ``chunks``."""
    pixels, chunks = shape[0] * prod(shape[2:]), -(-shape[1] // per_thread)
    return -(-pixels * chunks // THREADS), {"pixels": pixels, "chunks": chunks}
