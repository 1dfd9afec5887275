"""Windows that slide over images, as convolutions and poolings do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Dims

__all__ = ["Windows", "as_image", "image_dims", "image_values"]


def image_dims(rank: int) -> Dims:
    """A kernel's row is a pixel of a result [N, C, ...], its column a channel."""
    return (), (0, *range(2, rank)), (1,)


def as_image(operand: Operand) -> Operand:
    """An operand [N, C, H, W], or a line [N, C, L] as an image one row high."""
    if len(operand.shape) == 4:
        return operand
    *outer, length = operand.shape
    ref = operand.ref.apply(("reshape", (*outer, 1, length)))
    assert ref is not None
    return replace(operand, ref=ref)


@dataclass(frozen=True)
class Windows:
    """The geometry of windows, each pair vertical and horizontal.

    Attributes:
        kernel: Taps.
        stride: Pixels from one window to the next.
        padding: Pixels that the image is taken to have beyond each border.
        dilation: Pixels from one tap to the next.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def span(self, axis: int, along: int) -> int:
        """Lines (axis 0) or columns (axis 1) that the windows of `along` neighbouring results reach over."""
        return (along - 1) * self.stride[axis] + (self.kernel[axis] - 1) * self.dilation[axis] + 1


def image_values(image: Operand, shape: tuple[int, ...]) -> dict[str, int]:
    """Sizes of an image and a result, both [N, C, H, W], and where pixels lie, by the names of kernels' parameters."""
    image_stride, channel_stride, y_stride, x_stride = image.strides
    return {
        "height": image.shape[2],
        "width": image.shape[3],
        "out_height": shape[2],
        "out_width": shape[3],
        "image_stride": image_stride,
        "channel_stride": channel_stride,
        "y_stride": y_stride,
        "x_stride": x_stride,
    }
