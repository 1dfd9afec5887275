"""What one text may go on with, as the scheduler asks for it: what repeats in it, as much of it as pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from npu_text.batching.engine import BatchEngine
from npu_text.batching.guesses import GuessControl, RepeatedText, StepTimes
from npu_text.batching.texts import Turn

__all__ = ["TextGuesser", "guessing"]


class TextGuesser:
    """See `texts.Guesser`."""

    def __init__(self, control: GuessControl) -> None:
        self._control, self._text = control, RepeatedText()

    def guess(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """At most so many tokens that may follow a text, which has grown since it was last asked about."""
        self._text.extend(tokens[len(self._text.tokens) :])
        return self._text.guess(min(self._control.length() - 1, most))

    def learn(self, guessed: int, right: int) -> None:
        """How many of the guessed tokens were right."""
        self._control.learn(guessed, right)


def guessing(engine: BatchEngine) -> tuple[Callable[[], TextGuesser] | None, Callable[[Turn, float], None]]:
    """What makes guessers of texts, None where an engine checks no guesses; and what is told how long turns took."""
    times = StepTimes()

    def observe(turn: Turn, seconds: float) -> None:
        if turn.steps is not None and turn.alone:
            times.learn(1 + max(map(len, turn.steps.guesses), default=0), seconds)

    if engine.guess < 2:
        return None, observe
    return lambda: TextGuesser(GuessControl(times, [engine.guess])), observe
