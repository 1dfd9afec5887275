"""Decode steps with the choice of the next token behind them, where the device does all of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from npu_runtime.backend import Recording
from npu_runtime.buffer import NPUBuffer
from npu_text.language_model import TokenSequence
from npu_text.sampling import Sampling
from npu_text.step_functions import Tensor, write_number
from npu_text.token_choice import TokenChoice

__all__ = ["ChosenSteps"]


class ChosenSteps:
    """The steps of a sequence, for models that the device `updates_in_place`.

    Tokens and positions have two places each: a step reads one, and the choice behind it writes the other.

    Attributes:
        choice: What chooses.
    """

    def __init__(self, sequence: TokenSequence, sampling: Sampling) -> None:
        """Makes steps ready for the caches of a sequence, which may still be empty."""
        self.choice = TokenChoice(sequence.model, sampling)
        self._sequence = sequence
        self._fed = [self.choice.fed_back() for _ in range(2)]
        self._turn = 0
        self._held: tuple[int, int] | None = None  # token and position that the next step takes, if they are known
        self._recorded_for: Sequence[Tensor] = ()
        self._caches: list[NPUBuffer] = []
        self._recordings: list[Recording] = []
        self._record()

    def start(self, token: int) -> None:
        """Makes the next step take this token behind the sequence."""
        if self._sequence.caches is not self._recorded_for:
            self._record()
        position = len(self._sequence.tokens)
        if self._held != (token, position):
            given = self._fed[self._turn]
            write_number(given["tokens"], token)
            write_number(given["next_positions"], position)
        self._held = None

    def launch(self) -> Callable[[], None]:
        """Asks for a step, and gives what waits for it."""
        return self._next().launch()

    def run(self, token: int) -> int:
        """Takes one more token of the sequence, and gives the one that follows it.

        Raises:
            InputError: The cache is full.
            DeviceError: The device failed, or gave logits that are no numbers.
        """
        position = len(self._sequence.tokens)
        self.start(token)
        self._sequence.append([token])
        self._next().replay(sync=True, stream=None)
        chosen = self.choice.chosen_after(position)
        self._held = chosen, position + 1
        return chosen

    def _next(self) -> Recording:
        recording = self._recordings[self._turn]
        self._turn = 1 - self._turn
        return recording

    def _record(self) -> None:
        """Makes steps ready for the caches of the sequence, if they are not for these very ones."""
        caches = [cache for cache in self._sequence.caches if isinstance(cache, NPUBuffer)]
        if [cache.data for cache in caches] != [cache.data for cache in self._caches]:
            self._caches = caches
            self._recordings = [self._recorded(turn) for turn in range(2)]
        self._recorded_for = self._sequence.caches

    def _recorded(self, turn: int) -> Recording:
        """A step that reads the token and position of a turn, and the choice that writes those of the other."""
        model, given = self._sequence.model, self._fed[turn]
        positions = given["next_positions"]
        step, logits = model.bind_step(given["tokens"], positions, self._caches)
        choice = self.choice.bind(logits, positions, self._fed[1 - turn])
        return model.device.backend.record([step, choice])
