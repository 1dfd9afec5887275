"""Convolution, as every target's lowering sees it before it divides the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Dims, Problem
from npu_compiler.lowering.problems.windows import Windows, as_image, image_dims
from npu_compiler.tensor.trace import Anchor, TracedTensor

__all__ = ["Convolution"]


@dataclass(frozen=True)
class Convolution(Problem):
    """Cross-correlation of an image with filters, in one or more groups of channels.

    A line is an image one row high, and what a volume becomes is said by the op: kernels see four dimensions.

    Attributes:
        extents: The result as an image [N, O, H, W]; what the windows reach beyond the image is zero.
        image: [N, C, H, W].
        weight: [O, C / groups, KH, KW].
        windows: How the filters slide.
        groups: Groups of channels.
        outside: What the windows reach beyond the image, where it is codes: the one that stands for zero.
    """

    kind = "conv2d"
    operand_names = ("image", "weight")

    extents: tuple[int, int, int, int]
    image: Operand
    weight: Operand
    windows: Windows
    groups: int
    outside: int = 0

    @classmethod
    def of(cls, result: TracedTensor, anchor: Anchor, operands: Sequence[Operand]) -> Convolution:
        image, weight = map(as_image, operands)
        stride, padding, dilation = (anchor.attrs[name] for name in ("stride", "padding", "dilation"))
        kernel = weight.shape[2], weight.shape[3]
        windows = Windows(kernel, stride, padding, dilation)
        groups, outside = anchor.attrs["groups"], anchor.attrs["outside"]
        return cls(result, anchor.attrs["extents"], image, weight, windows, groups, outside)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.extents

    @property
    def dims(self) -> Dims:
        return image_dims(len(self.result.shape))

    @property
    def pixels(self) -> int:
        """Of all results of the batch."""
        return self.shape[0] * prod(self.shape[2:])

    @property
    def outputs(self) -> int:
        """Channels of the result in one group."""
        return self.weight.shape[0] // self.groups

    @property
    def channels(self) -> int:
        """Channels of the image in one group."""
        return self.weight.shape[1]

    @property
    def depth(self) -> int:
        """Products that each result sums."""
        return prod(self.weight.shape[1:])

    @property
    def flops(self) -> int:
        return 2 * prod(self.shape) * self.depth
