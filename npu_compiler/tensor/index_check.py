"""Indices that kernels check: what each is about, and how a fault of one is worded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

__all__ = ["FAULT_BYTES", "IndexCheck"]

FAULT_BYTES = 16
"""Of the record that a fault leaves: its check's number counted from 1 (int32, 0 while there is none), the element of
the index tensor (int32), and the value found there (int64)."""


@dataclass(frozen=True)
class IndexCheck:
    """An index whose values kernels compare with the size of a dimension before they touch memory.

    Attributes:
        tensor: Name of the index tensor in the IR; of the node, where it has none of its own.
        shape: Its shape.
        node: The node that indexes.
        extent: Size of the dimension that is indexed.
        wraps: Whether indices from -`extent` on count from the end; the record then holds them plus `extent`.
    """

    tensor: str
    shape: tuple[int, ...]
    node: str
    extent: int
    wraps: bool = False

    def refusal(self, element: int, value: int, inputs: Collection[str]) -> str:
        """What to tell of a fault.

        Args:
            element: Which element of the index tensor, in row-major order.
            value: What the record holds.
            inputs: Names of the function's inputs.
        """
        given = value - self.extent if self.wraps and value < 0 else value
        lowest = -self.extent if self.wraps else 0
        what = "input" if self.tensor in inputs else "tensor"
        return (
            f"{what} '{self.tensor}': given the index {given} at position {self._position(element)}, expected "
            f"{lowest} to {self.extent - 1}, as '{self.node}' indexes a dimension of {self.extent}"
        )

    def _position(self, element: int) -> list[int]:
        rest = element % max(1, prod(self.shape))
        position = []
        for size in reversed(self.shape):
            position.append(rest % max(1, size))
            rest //= max(1, size)
        return position[::-1]
