"""Pooling, as every target's lowering sees it before it divides the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from npu_compiler.integers import ceil_div
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Dims, Problem
from npu_compiler.lowering.problems.windows import Windows, as_image, image_dims
from npu_compiler.tensor.trace import Anchor, TracedTensor

__all__ = ["Divisor", "Pooling"]


class Divisor(Enum):
    """What the sum over a window is divided by; the value says it in the terms of a kernel's struct ``Window``."""

    ONE = "1"
    PADDED = "(rows.padded * columns.padded)"
    INSIDE = "((rows.end - rows.start) * (columns.end - columns.start))"


_DIVISORS = {
    "max": Divisor.ONE,
    "sum": Divisor.ONE,
    "mean": Divisor.PADDED,
    "mean_valid": Divisor.INSIDE,
    "adaptive": Divisor.PADDED,
    "adaptive_max": Divisor.ONE,
}


@dataclass(frozen=True)
class Pooling(Problem):
    """The maximum, sum or mean over windows of an image; of a line, as of an image one row high.

    Attributes:
        extents: The result as an image [N, C, H, W].
        image: [N, C, H, W].
        windows: Their geometry; of adaptive windows only the size that none exceeds.
        maximum: Whether the greatest element wins; else elements are summed.
        adaptive: Whether window i of n spans ``floor(i * size / n)`` to ``ceil((i + 1) * size / n)``.
        divisor: What sums are divided by.
    """

    kind = "pool2d"
    operand_names = ("image",)

    extents: tuple[int, int, int, int]
    image: Operand
    windows: Windows
    maximum: bool
    adaptive: bool
    divisor: Divisor

    @classmethod
    def of(cls, result: TracedTensor, anchor: Anchor, operands: Sequence[Operand]) -> Pooling:
        image, extents = as_image(operands[0]), anchor.attrs["extents"]
        reduction = anchor.attrs["reduction"]
        adaptive = reduction in ("adaptive", "adaptive_max")
        if adaptive:
            height, width = (ceil_div(n, out) for n, out in zip(image.shape[2:], extents[2:], strict=True))
            windows = Windows((height, width), (1, 1), (0, 0), (1, 1))
        else:
            windows = Windows(*(anchor.attrs[name] for name in ("kernel", "stride", "padding", "dilation")))
        maximum = reduction in ("max", "adaptive_max")
        return cls(result, extents, image, windows, maximum, adaptive, _DIVISORS[reduction])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.extents

    @property
    def dims(self) -> Dims:
        return image_dims(len(self.result.shape))

    @property
    def flops(self) -> int:
        return prod(self.shape) * prod(self.windows.kernel)
