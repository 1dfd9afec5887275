"""Convolution, as every target's lowering sees it before it divides the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Dims, Problem
from npu_compiler.lowering.problems.windows import IMAGE_DIMS, Windows
from npu_compiler.tensor.trace import Anchor, TracedTensor

__all__ = ["Convolution"]


@dataclass(frozen=True)
class Convolution(Problem):
    """Cross-correlation of an image with filters, in one or more groups of channels.

    Attributes:
        image: [N, C, H, W].
        weight: [O, C / groups, KH, KW].
        windows: How the filters slide.
        groups: Groups of channels.
    """

    kind = "conv2d"

    image: Operand
    weight: Operand
    windows: Windows
    groups: int

    @classmethod
    def of(cls, result: TracedTensor, anchor: Anchor, operands: Sequence[Operand]) -> Convolution:
        image, weight = operands
        stride, padding, dilation = (anchor.attrs[name] for name in ("stride", "padding", "dilation"))
        kernel = weight.shape[2], weight.shape[3]
        return cls(result, image, weight, Windows(kernel, stride, padding, dilation), anchor.attrs["groups"])

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.image, self.weight

    def with_operand(self, position: int, operand: Operand) -> Self:
        changed: dict[str, Any] = {("image", "weight")[position]: operand}
        return replace(self, **changed)

    @property
    def dims(self) -> Dims:
        return IMAGE_DIMS

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
