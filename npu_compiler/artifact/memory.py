"""Memory planning: intermediate tensors that are never alive together share bytes of one arena."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from npu_compiler.integers import ceil_div, power_of_two

__all__ = ["ALIGNMENT", "Lifetime", "plan_arena"]

ALIGNMENT = 256  # bytes; suits vector loads of every device


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `nbytes`, written first at step `start` and last used at step `end`, both inclusive."""

    key: int
    nbytes: int
    start: int
    end: int


def plan_arena(lifetimes: Iterable[Lifetime]) -> tuple[dict[int, int], int]:
    """Places buffers so that no two that are alive at one step overlap.

    Greedy by size, as in Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020): the
    largest buffer first, each into the smallest gap that holds it among those already placed that live with it.

    Returns:
        The byte offset of each buffer by key, and the size of the arena.
    """
    ordered = sorted(lifetimes, key=lambda item: (-item.nbytes, item.start, item.key))
    placed = _Placed(max((life.end for life in ordered), default=0) + 1)
    offsets: dict[int, int] = {}
    total = 0
    for life in ordered:
        size = ceil_div(life.nbytes, ALIGNMENT) * ALIGNMENT
        offsets[life.key] = begin = _best_gap(placed.alive_with(life), size)
        placed.add(life, (begin, begin + size))
        total = max(total, begin + size)
    return offsets, total


class _Placed:
    """The ranges of bytes given away, by the steps at which they are: a search tree over the steps."""

    def __init__(self, steps: int) -> None:
        self._leaves = power_of_two(steps)
        self._whole: dict[int, list[tuple[int, int]]] = {}  # by tree node: ranges that live through all of its steps
        self._starting: dict[int, list[tuple[int, int]]] = {}  # by step

    def add(self, life: Lifetime, taken: tuple[int, int]) -> None:
        self._starting.setdefault(life.start, []).append(taken)
        low, high = life.start + self._leaves, life.end + self._leaves + 1
        while low < high:
            if low & 1:
                self._whole.setdefault(low, []).append(taken)
                low += 1
            if high & 1:
                high -= 1
                self._whole.setdefault(high, []).append(taken)
            low, high = low >> 1, high >> 1

    def alive_with(self, life: Lifetime) -> list[tuple[int, int]]:
        """The ranges of those alive at some step of another one, by their beginning."""
        found: list[tuple[int, int]] = []
        node = life.start + self._leaves
        while node:
            found += self._whole.get(node, ())
            node >>= 1
        for step in range(life.start + 1, life.end + 1):
            found += self._starting.get(step, ())
        return sorted(found)


def _best_gap(taken: list[tuple[int, int]], size: int) -> int:
    """Start of the smallest gap of at least `size` between taken ranges sorted by start, or the end of them all."""
    best: tuple[int, int] | None = None
    cursor = 0
    for begin, end in taken:
        gap = begin - cursor
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, cursor)
        cursor = max(cursor, end)
    return cursor if best is None else best[1]
