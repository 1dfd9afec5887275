"""Wall-clock times of actions."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TypeVar

__all__ = ["median_time", "timed"]

T = TypeVar("T")


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """What `action` returns, and the seconds it took."""
    start = perf_counter()
    result = action()
    return result, perf_counter() - start


def median_time(action: Callable[[], T], runs: int, warm_up: int = 1) -> tuple[T, float]:
    """What `action` returned last, and the median of `runs` times in seconds, after `warm_up` runs that don't count."""
    for _ in range(warm_up):
        action()
    results = [timed(action) for _ in range(runs)]
    return results[-1][0], median(seconds for _, seconds in results)
