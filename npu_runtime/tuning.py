"""What timing the options that a compiler left to a device found."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OptionTimes", "Tuned", "Tuning"]


@dataclass(frozen=True)
class OptionTimes:
    """How long the options of a choice took.

    Attributes:
        microseconds: Of each option in its place, by itself; None where the device cannot run it.
        winner: Index of the option to take: the one that made the whole run quickest.
    """

    microseconds: tuple[float | None, ...]
    winner: int


@dataclass(frozen=True)
class Tuned:
    """A distinct choice between options that the device can run, and what was found.

    Attributes:
        label: What it computes, where the plan first makes it.
        count: How often the plan makes it.
        options: What each option launches, for people.
        times: How long each option takes.
    """

    label: str
    count: int
    options: tuple[str, ...]
    times: OptionTimes


@dataclass(frozen=True)
class Tuning:
    """What tuning a plan found.

    Attributes:
        choices: The distinct choices.
        before, after: Seconds of a whole run on the device, with the preferred options and with the winners; both are
            zero where there is no choice. Where the winners came out slower, the preferred options are kept.
    """

    choices: tuple[Tuned, ...]
    before: float = 0.0
    after: float = 0.0
