"""Arithmetic of whole numbers."""

from __future__ import annotations

__all__ = ["ceil_div", "power_of_two"]


def ceil_div(number: int, divisor: int) -> int:
    """`number` / `divisor`, rounded up: how many parts of a size hold all. The divisor is positive."""
    return -(-number // divisor)


def power_of_two(number: int) -> int:
    """The least power of two that is no less; 1 for anything below."""
    return 1 << max(0, number - 1).bit_length()
