"""Generation in which the device chooses each token and feeds it to the next step; the host reads along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from npu_runtime.backend import Recording
from npu_runtime.buffer import NPUBuffer
from npu_text.language_model import TokenSequence
from npu_text.sampling import Sampler
from npu_text.step_choice import StepChoice
from npu_text.step_functions import Tensor, write_number

__all__ = ["decode_on_device"]

_AHEAD = 4  # steps that the device has been asked for beyond the one whose token is read

_Wait = Callable[[], None]


def decode_on_device(sequence: TokenSequence, sampler: Sampler, limit: int) -> Callable[[Tensor], Iterator[int]]:
    """Chooses the token at each step on the device, which is asked for some steps ahead.

    For models of which the device does all of a step, and updates caches in place (`LanguageModel.updates_in_place`).
    A token is read once its step has run, while the next ones are running. When the reader stops, steps that have been
    asked for still run: what they write to the caches lies behind the end of the sequence, where later tokens overwrite
    it before any of them looks.

    Args:
        sequence: What the tokens follow; a token joins it when the next one is asked for.
        sampler: How to choose.
        limit: The most tokens to give.

    Returns:
        What a `Decoding` gives. Its iterator raises DeviceError where the device failed, or gave logits that are no
        numbers.
    """
    return partial(_tokens, _Loop(sequence, sampler), sequence, limit)


def _tokens(loop: _Loop, sequence: TokenSequence, limit: int, logits: Tensor) -> Iterator[int]:
    token = loop.chosen_from(logits)
    yield token
    steps = min(limit - 1, sequence.model.spec.cache_length - len(sequence.tokens))
    if steps > 0:
        loop.start(token)
    running: deque[_Wait] = deque()
    try:
        for number in range(steps):
            while len(running) < min(1 + _AHEAD, steps - number):
                running.append(loop.launch())
            running.popleft()()
            sequence.tokens.append(token)
            token = loop.chosen_after(len(sequence.tokens) - 1)
            yield token
    finally:
        while running:
            running.popleft()()


class _Loop:
    """Decode steps, each followed by the choice of the next token.

    Tokens and positions have two places each: a step reads one, and the choice behind it writes the other.
    """

    def __init__(self, sequence: TokenSequence, sampler: Sampler) -> None:
        self._sequence = sequence
        self._choice = StepChoice(sequence.model, sampler)
        self._made = [self._choice.made() for _ in range(2)]
        self._turn = 0
        self._caches: list[NPUBuffer] = []
        self._recordings: list[Recording] = []
        self._record()

    def start(self, token: int) -> None:
        """Makes the next step take this token behind the sequence."""
        self._record()
        for name, value in (("tokens", token), ("next_positions", len(self._sequence.tokens))):
            write_number(self._made[self._turn][name], value)

    def launch(self) -> _Wait:
        """Asks for one step, and gives what waits for it."""
        recording = self._recordings[self._turn]
        self._turn = 1 - self._turn
        return recording.launch()

    def chosen_from(self, logits: Tensor) -> int:
        """The token that follows the sequence, whose last token gave these logits."""
        return self._choice.choose(logits, len(self._sequence.tokens) - 1)

    def chosen_after(self, position: int) -> int:
        """The token that a step which has run chose to follow the one at `position`."""
        return self._choice.chosen_after(position)

    def _record(self) -> None:
        """Makes steps ready for the caches of the sequence, if they are not for these very ones."""
        caches = [cache for cache in self._sequence.caches if isinstance(cache, NPUBuffer)]
        if [cache.data for cache in caches] != [cache.data for cache in self._caches]:
            self._caches = caches
            self._recordings = [self._recorded(turn) for turn in range(2)]

    def _recorded(self, turn: int) -> Recording:
        """A step that reads the tokens and positions of a turn, and the choice that writes those of the other."""
        model, given = self._sequence.model, self._made[turn]
        positions = given["next_positions"]
        step, logits = model.bind_step(given["tokens"], positions, self._caches)
        chosen = self._choice.bind(logits, positions, self._made[1 - turn])
        return model.device.backend.record([step, chosen])
