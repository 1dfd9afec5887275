"""Candidates: a family of kernels with sizes, and the time that they are predicted to take; which of them to keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["THE_BEST", "Candidate", "Kept", "best_candidates"]

Sizes = TypeVar("Sizes", covariant=True)


@dataclass(frozen=True)
class Candidate(Generic[Sizes]):
    """One way to compute something.

    Attributes:
        family: The family of kernels, by its name in the data of devices.
        sizes: How the work is cut up.
        microseconds: How long it takes, by the family's model of its cost. The unit is one for all families, so that
            their candidates compare.
        requires: What a device must have to run it, as in `CallOption`; empty for any.
    """

    family: str
    sizes: Sizes
    microseconds: float
    requires: str = ""


@dataclass(frozen=True)
class Kept:
    """Which candidates are worth timing on the device.

    Attributes:
        close: What they may take at the most, in times of the best: how far the models of their cost may be off.
        most: How many they may be.
    """

    close: float
    most: int


THE_BEST = Kept(close=1.0, most=1)
"""For what a device does not choose: one candidate, and one for any device where that requires something."""


def best_candidates(candidates: Iterable[Candidate[Sizes]], kept: Kept) -> tuple[Candidate[Sizes], ...]:
    """The candidates that are worth timing, the best by the models of their cost first; none of none.

    Where all of these require something, the best that requires nothing follows them, if there is one: a program runs
    on other devices than the one it was compiled for.

    Args:
        candidates: Of one family or of several. Of those that take equally long, the first one is the best.
        kept: How many, and how close to the best.
    """
    ranked = sorted(candidates, key=lambda candidate: candidate.microseconds)
    best = [each for each in ranked[: kept.most] if each.microseconds <= kept.close * ranked[0].microseconds]
    if all(candidate.requires for candidate in best):
        best += [candidate for candidate in ranked if not candidate.requires][:1]
    return tuple(best)
