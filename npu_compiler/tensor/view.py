"""The strided view: transpose, expand, slice and reshape without a copy, where strides can say it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from npu_compiler.tensor.interning import Interned

__all__ = ["Step", "View", "collapse"]

Step = tuple[str, tuple[int, ...]]
"""One view operation by name, with its arguments; `View.apply` performs it."""


@dataclass(frozen=True, slots=True, eq=False)
class View(Interned):
    """Element ``(i0, i1, ...)`` lies ``offset + i0*strides[0] + i1*strides[1] + ...`` elements into a buffer."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def permute(self, dims: tuple[int, ...]) -> View:
        """Dimension `i` of the result is dimension `dims[i]` of this view."""
        return View(tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims), self.offset)

    def expand(self, shape: tuple[int, ...]) -> View:
        """Broadcasts to `shape`: new leading dimensions, and those of size 1, are repeated."""
        if shape == self.shape:
            return self
        lead = len(shape) - len(self.shape)
        strides = [0] * lead
        for size, own, stride in zip(shape[lead:], self.shape, self.strides, strict=True):
            strides.append(stride if own == size else 0)
        return View(shape, tuple(strides), self.offset)

    def slice(self, dim: int, start: int, length: int, step: int) -> View:
        """`length` elements of a dimension from `start`, `step` apart, backwards where that is negative.

        What lies outside must not be read.
        """
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        strides = (*self.strides[:dim], self.strides[dim] * step, *self.strides[dim + 1 :])
        return View(shape, strides, self.offset + start * self.strides[dim])

    def window(self, dim: int, count: int, step: int, size: int, dilation: int) -> View:
        """Windows along a dimension, `step` apart, in its place; their `size` taps, `dilation` apart, come last."""
        shape = (*self.shape[:dim], count, *self.shape[dim + 1 :], size)
        stride = self.strides[dim]
        strides = (*self.strides[:dim], stride * step, *self.strides[dim + 1 :], stride * dilation)
        return View(shape, strides, self.offset)

    def reshape(self, shape: tuple[int, ...]) -> View | None:
        """The same elements in row-major order under another shape, or None where strides can't say it."""
        if shape == self.shape:
            return self
        if prod(shape) == 0:
            return View(shape, (0,) * len(shape), self.offset)
        runs = _runs(self)
        strides: list[int] = []
        for size in reversed(shape):
            if size == 1:
                strides.append(0)
                continue
            while runs and runs[-1][0] == 1:
                runs.pop()
            if not runs or runs[-1][0] % size:
                return None
            length, stride = runs.pop()
            strides.append(stride)
            runs.append((length // size, stride * size))
        return View(shape, tuple(reversed(strides)), self.offset)

    def apply(self, step: Step) -> View | None:
        """Performs a view operation given as data; None where strides can't say it."""
        name, args = step
        if name == "permute":
            return self.permute(args)
        if name == "expand":
            return self.expand(args)
        if name == "slice":
            return self.slice(*args)
        if name == "window":
            return self.window(*args)
        return self.reshape(args)

    def same_elements(self, other: View) -> bool:
        """Whether both read the same element at each position; the stride of a dimension of size 1 does not matter."""
        return (
            self.shape == other.shape
            and self.offset == other.offset
            and all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, other.strides, strict=True))
        )

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def _runs(view: View) -> list[tuple[int, int]]:
    """The view as the fewest (length, stride) pairs, outermost first, that enumerate it in row-major order."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(view.shape, view.strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs


def collapse(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merges neighbouring dimensions that all operands walk as one.

    Args:
        shape: Iteration space.
        strides: For each operand its stride along each dimension.

    Returns:
        The smaller iteration space, and the operands' strides over it. Dimensions of size 1 are gone; a scalar's
        iteration space is ``(1,)``.
    """
    sizes: list[int] = []
    columns: list[tuple[int, ...]] = []  # for each kept dimension, the stride of every operand
    for size, column in zip(shape, zip(*strides, strict=True) if strides else [()] * len(shape), strict=True):
        if size == 1:
            continue
        if sizes and all(outer == inner * size for outer, inner in zip(columns[-1], column, strict=True)):
            sizes[-1] *= size
            columns[-1] = column
        else:
            sizes.append(size)
            columns.append(column)
    if not sizes:
        return (1,), [(0,)] * len(strides)
    return tuple(sizes), [tuple(column[i] for column in columns) for i in range(len(strides))]
