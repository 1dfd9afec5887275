"""Guesses of the tokens that follow, which one step for several tokens checks; they change no text, only its time.

What is guessed is what followed the longest run of tokens, at the end of the text, that the text had before (prompt
lookup: Saxena, "Prompt Lookup Decoding", 2023). Guesses are checked as `choosing.accepted` says. A lane with penalties
has none, as the counts behind a guess depend on it.

What a grammar leaves no choice for is no guess: a `Grammar` names those tokens, and they go into the cache like those
of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Grammar", "GuessControl", "RepeatedText", "StepTimes"]

_LONGEST, _SHORTEST = 6, 2  # tokens of a run that is looked for
_FORGETTING = 0.1  # weight of what was seen last
_HOPE = 0.5  # share of guessed tokens that are right, before any was checked
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 256  # tokens until a guess is tried again that did not pay


class Grammar(Protocol):
    """What a text must follow."""

    def forced(self, most: int) -> Sequence[int]:
        """The tokens that must follow, up to the first one that there is a choice for; no more than `most`."""


class RepeatedText:
    """The tokens of a text, and where its runs of some tokens were last. A token takes the same time at any length."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of the latest run, ahead of the one at the end
        self._earlier = 0  # where the run was before with which the text ends; 0 for nowhere
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the end."""
        for token in tokens:
            self.tokens.append(token)
            end, self._earlier = len(self.tokens), 0
            for length in range(_LONGEST, _SHORTEST - 1, -1):
                if length <= end:
                    run = tuple(self.tokens[-length:])
                    self._earlier = self._earlier or self._ends.get(run, 0)
                    self._ends[run] = end

    def guess(self, count: int) -> list[int]:
        """What may follow: `count` tokens, or none where no run of the text's end was there before.

        Where the earlier run reaches to the end itself, what follows repeats with it.
        """
        if not self._earlier:
            return []
        period = len(self.tokens) - self._earlier
        return [self.tokens[self._earlier + number % period] for number in range(count)]


class StepTimes:
    """How long steps for so many tokens of a text take, as measured; of all texts together."""

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        """Begins with times by numbers of tokens, if there are any; without one for 1 nothing is known to pay."""
        self._seconds = dict(seconds or {})

    def learn(self, tokens: int, seconds: float) -> None:
        """Takes notice of the time that a step took."""
        known = self._seconds.get(tokens, seconds)
        self._seconds[tokens] = known + _FORGETTING * (seconds - known)

    def ratio(self, tokens: int) -> float | None:
        """The time of a step for so many tokens over that for one; None where one of them is not known.

        A step for more tokens counts, where there is none for as many.
        """
        fitting = [number for number in self._seconds if number >= tokens]
        if 1 not in self._seconds or not fitting:
            return None
        return self._seconds[min(fitting)] / self._seconds[1]


@dataclass
class GuessControl:
    """How many tokens of one text to guess: as many as pay by the share of them that has been right.

    Of guessed tokens that are each right with probability p a step of 1 + k tokens gives ``1 + p + ... + p ** k`` on
    average; it pays where that is more than its time, in steps of one token. Where none pays, it is tried again after
    a pause, which doubles each time.

    Attributes:
        times: Of steps.
        lengths: How many tokens steps take, 1 aside.
        share: Of guessed tokens that were right, of late.
    """

    times: StepTimes
    lengths: Sequence[int]
    share: float = _HOPE
    _pause: int = field(default=_FIRST_PAUSE, init=False)
    _waits: int = field(default=0, init=False)

    def length(self) -> int:
        """How many tokens the next step is to take: one of `lengths`, or 1 for no guess."""
        if self._waits:
            self._waits -= 1
            return 1
        best, most = 1, 1.0
        for length in self.lengths:
            ratio = self.times.ratio(length)
            gain = self._expected(length) / ratio if ratio else most
            if ratio is None:  # to be measured
                return length
            if gain > most:
                best, most = length, gain
        if best == 1 and self.lengths:
            self._waits, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
            self.share = max(self.share, _HOPE)  # tried with the hope of the start
        return best

    def learn(self, guessed: int, right: int) -> None:
        """Takes notice of how many of the guessed tokens were right, before the first that was not."""
        for number in range(min(guessed, right + 1)):
            self.share += _FORGETTING * ((number < right) - self.share)
        if right:
            self._pause = _FIRST_PAUSE

    def _expected(self, length: int) -> float:
        return sum(self.share**number for number in range(length))
