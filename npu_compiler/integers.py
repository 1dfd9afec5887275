"""Arithmetic of whole numbers."""

from __future__ import annotations

__all__ = ["ceil_div"]


def ceil_div(number: int, divisor: int) -> int:
    """`number` / `divisor`, rounded up: how many parts of a size hold all. The divisor is positive."""
    return -(-number // divisor)
