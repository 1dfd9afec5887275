"""The products that candidates are timed with: matrices of a language model and convolutions of images, as IR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from npu_compiler.graph.ir_builder import IRBuilder, IRTensor

__all__ = ["PRODUCTS", "Timed", "weight_name"]

_DTYPE = "float16"
_MOST_COPIES, _LEAST_COPIES = 8, 3
_WALKED_BYTES = 120_000_000  # of all copies together, so that one does not find its operands in a cache


def weight_name(copy: int) -> str:
    """The name of a copy's weight, in the IR and in the weight file."""
    return f"w{copy}"


@dataclass(frozen=True)
class Timed:
    """A linear layer, or a convolution, that is timed in several copies with operands of their own.

    Attributes:
        image: Shape of the input, [M, K] or [N, C, H, W].
        weight: Shape of the weight, [N, K] or [O, C, KH, KW].
        step: Pixels from one window to the next.
    """

    image: tuple[int, ...]
    weight: tuple[int, ...]
    step: int = 1

    @property
    def name(self) -> str:
        """For people: the shapes."""
        image, weight = ("x".join(map(str, shape)) for shape in (self.image, self.weight))
        return f"{image} by {weight}" + (f", step {self.step}" if self.step > 1 else "")

    @property
    def copies(self) -> int:
        """How many copies a run holds."""
        nbytes = 2 * (prod(self.image) + prod(self.weight))
        return max(_LEAST_COPIES, min(_MOST_COPIES, round(_WALKED_BYTES / nbytes)))

    @property
    def _padding(self) -> int:
        return self.weight[-1] // 2

    @property
    def _result(self) -> tuple[int, ...]:
        if len(self.image) == 2:
            return self.image[0], self.weight[0]
        sides = ((side + 2 * self._padding - self.weight[-1]) // self.step + 1 for side in self.image[2:])
        return self.image[0], self.weight[0], *sides

    def ir(self) -> dict[str, Any]:
        """All copies in one graph, which does not connect them."""
        builder, results = IRBuilder(), []
        weights = [self._tensor(weight_name(copy), self.weight) for copy in range(self.copies)]
        for copy, weight in enumerate(weights):
            x = builder.input(f"x{copy}", self.image, _DTYPE)
            attrs = {"stride": [self.step] * 2, "padding": [self._padding] * 2} if len(self.image) == 4 else {}
            op = "conv2d.default" if len(self.image) == 4 else "linear.default"
            results.append(builder.add(op, _DTYPE, self._result, x, weight, name=f"y{copy}", **attrs))
        names = {weight["name"]: weight["name"] for weight in weights}
        return builder.build("tiles", results, weights=weights, weight_name_mapping=names)

    @staticmethod
    def _tensor(name: str, shape: Sequence[int]) -> IRTensor:
        return {"name": name, "shape": list(shape), "dtype": _DTYPE}


def _linears() -> list[Timed]:
    """The products of a layer of a language model of 1.5 billion parameters, of prompts of several lengths."""
    sizes = [(17920, 1536), (1536, 8960), (2048, 1536), (1536, 1536)]
    return [Timed((m, k), (n, k)) for m in (32, 64, 128, 512, 2048) for n, k in sizes]


def _convolutions() -> list[Timed]:
    """Convolutions of ResNet-50: side, channels, outputs, taps and step."""
    sizes = [
        (56, 64, 64, 3, 1),
        (28, 128, 128, 3, 1),
        (14, 256, 256, 3, 1),
        (7, 512, 512, 3, 1),
        (56, 64, 256, 1, 1),
        (56, 256, 128, 1, 1),
        (14, 1024, 256, 1, 1),
        (7, 512, 2048, 1, 1),
        (28, 256, 256, 3, 2),
    ]
    return [
        Timed((batch, channels, side, side), (outputs, channels, taps, taps), step)
        for batch in (1, 8, 32)
        for side, channels, outputs, taps, step in sizes
    ]


PRODUCTS = (*_linears(), *_convolutions())
