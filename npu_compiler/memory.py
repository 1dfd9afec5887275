"""Memory planning: intermediate tensors that are never alive together share bytes of one arena."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    placed: list[tuple[int, int, Lifetime]] = []  # begin, end, lifetime
    offsets: dict[int, int] = {}
    for life in sorted(lifetimes, key=lambda item: (-item.nbytes, item.start, item.key)):
        size = -(-life.nbytes // ALIGNMENT) * ALIGNMENT
        neighbours = sorted((b, e) for b, e, o in placed if o.start <= life.end and life.start <= o.end)
        offsets[life.key] = begin = _best_gap(neighbours, size)
        placed.append((begin, begin + size, life))
    return offsets, max((end for _, end, _ in placed), default=0)


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
