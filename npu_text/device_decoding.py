"""Generation in which the device chooses each token and feeds it to the next step; the host reads along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from npu_compiler.graph.next_token import NO_NUMBER, next_token_ir
from npu_compiler.graph.sampled_token import SLOTS, UNDECIDED, sampled_token_ir
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.backend import Recording
from npu_runtime.buffer import NPUBuffer
from npu_runtime.executor import Executor
from npu_text.language_model import LanguageModel, TokenSequence
from npu_text.sampling import Drawing, Sampler, not_a_number
from npu_text.step_functions import Tensor, device_buffer, visible, write_number

__all__ = ["can_decode_on_device", "decode_on_device"]

_AHEAD = 4  # steps that the device has been asked for beyond the one whose token is read; fewer than SLOTS

_Wait = Callable[[], None]


def can_decode_on_device(model: LanguageModel, sampler: Sampler) -> bool:
    """Whether `decode_on_device` works: where the device does all of a step and updates caches in place.

    Not for `top_p` among very many `top_k` (`Sampling.drawing`), where the device would leave much undecided.
    """
    return model.updates_in_place and (sampler.sampling.temperature == 0 or sampler.sampling.drawing is not None)


def decode_on_device(sequence: TokenSequence, sampler: Sampler, limit: int) -> Callable[[Tensor], Iterator[int]]:
    """Chooses the token at each step on the device, which is asked for some steps ahead.

    A token is read once its step has run, while the next ones are running. When the reader stops, steps that have been
    asked for still run: what they write to the caches lies behind the end of the sequence, where later tokens overwrite
    it before any of them looks. The same holds where the device drew no token of which it is certain that `top_k` and
    `top_p` allow it: the host then has the step run once more, and chooses.

    Args:
        sequence: What the tokens follow; a token joins it when the next one is asked for.
        sampler: One for which `can_decode_on_device` holds. Its random numbers are those that it would use itself.
        limit: The most tokens to give.

    Returns:
        What a `Decoding` gives. Its iterator raises DeviceError where the device failed, or gave logits that are no
        numbers.
    """
    return partial(_tokens, _Loop(sequence, sampler), sequence, sampler, limit)


def _tokens(loop: _Loop, sequence: TokenSequence, sampler: Sampler, limit: int, logits: Tensor) -> Iterator[int]:
    token = sampler.choose_from(logits)
    yield token
    steps = min(limit - 1, sequence.model.spec.cache_length - len(sequence.tokens))
    if steps > 0:
        loop.start(sequence, token)
    running: deque[_Wait] = deque()
    try:
        for number in range(steps):
            while len(running) < min(1 + _AHEAD, steps - number):
                running.append(loop.launch())
            running.popleft()()
            sequence.tokens.append(token)
            token, draws = loop.chosen_after(len(sequence.tokens) - 1)
            if token == UNDECIDED:
                _drain(running)
                token = sampler.choose_from(sequence.advance([sequence.tokens.pop()]), draws)
                loop.start(sequence, token)
            yield token
    finally:
        _drain(running)


def _drain(running: deque[_Wait]) -> None:
    while running:
        running.popleft()()


class _Loop:
    """Decode steps, each followed by the choice of the next token.

    Tokens and positions have two places each: a step reads one, and the choice behind it writes the other.
    """

    def __init__(self, sequence: TokenSequence, sampler: Sampler) -> None:
        model = self._model = sequence.model
        drawing = sampler.sampling.drawing
        choice = self._choice = _choice(model, drawing)
        ins = {spec.name: spec for spec in choice.plan.inputs}
        outs = {spec.name: spec for spec in choice.plan.outputs}
        self._read, self._chosen = visible(model.device, ins["chosen"])
        self._tokens = [device_buffer(model.device, outs["tokens"]) for _ in range(2)]
        self._positions = [device_buffer(model.device, outs["next_positions"]) for _ in range(2)]
        self._draws = _Draws(model, sampler, drawing, ins) if drawing is not None else None
        self._turn, self._position = 0, 0
        self._caches: list[NPUBuffer] = []
        self._recordings: list[Recording] = []
        self._record(sequence)

    def start(self, sequence: TokenSequence, token: int) -> None:
        """Makes the next step take this token behind a sequence."""
        self._record(sequence)
        self._position = len(sequence.tokens)
        for buffer, value in ((self._tokens, token), (self._positions, self._position)):
            write_number(buffer[self._turn], value)

    def launch(self) -> _Wait:
        """Asks for one step, and gives what waits for it."""
        if self._draws is not None:
            self._draws.put(self._position)
        self._position += 1
        recording = self._recordings[self._turn]
        self._turn = 1 - self._turn
        return recording.launch()

    def chosen_after(self, position: int) -> tuple[int, NDArray[np.float32] | None]:
        """The token that a step which has run chose to follow the one at `position`, and the random numbers for it.

        The token is `UNDECIDED` where it chose none.
        """
        token = int(self._read[position])
        if token == NO_NUMBER:
            raise not_a_number("no number")
        return token, None if self._draws is None else self._draws.take(position)

    def _record(self, sequence: TokenSequence) -> None:
        """Makes steps ready for the caches of a sequence, if they are not for these very ones."""
        caches = [cache for cache in sequence.caches if isinstance(cache, NPUBuffer)]
        if [cache.data for cache in caches] != [cache.data for cache in self._caches]:
            self._caches = caches
            self._recordings = [self._recorded(turn) for turn in range(2)]

    def _recorded(self, turn: int) -> Recording:
        """A step that reads the tokens and positions of a turn, and the choice that writes those of the other."""
        positions = self._positions[turn]
        bound, logits = self._model.bind_step(self._tokens[turn], positions, self._caches)
        chosen = self._choice.bind(
            {
                "logits": logits,
                "positions": positions,
                "chosen": self._chosen,
                **(self._draws.inputs if self._draws is not None else {}),
            },
            {"tokens": self._tokens[1 - turn], "next_positions": self._positions[1 - turn]},
        )
        return self._model.device.backend.record([bound, chosen])


class _Draws:
    """The random numbers of the steps that run, where the device reads them.

    Attributes:
        inputs: What `sampled_token_ir` takes beyond what the greedy choice takes.
    """

    def __init__(self, model: LanguageModel, sampler: Sampler, drawing: Drawing, specs: dict[str, BufferSpec]) -> None:
        self._sampler = sampler
        self._drawn: dict[int, NDArray[np.float32]] = {}  # by position, until their token is read
        self._slots, memory = visible(model.device, specs["draws"])
        numbers = {"inverse_temperature": sampler.inverse_temperature, **drawing.limits}
        arrays = {name: np.full(1, number, np.float32) for name, number in numbers.items()}
        self.inputs = {"draws": memory} | {
            name: NPUBuffer.from_numpy(array, model.device, specs[name]) for name, array in arrays.items()
        }

    def put(self, position: int) -> None:
        """Gives the device those for the token behind a position: new ones, unless that token is chosen once more."""
        if position not in self._drawn:
            self._drawn[position] = self._sampler.draws()
        self._slots[position % SLOTS] = self._drawn[position]

    def take(self, position: int) -> NDArray[np.float32]:
        """Those that the token behind a position was chosen by; they are forgotten."""
        return self._drawn.pop(position)


def _choice(model: LanguageModel, drawing: Drawing | None) -> Executor:
    """What chooses the next token."""
    sizes = model.spec.vocabulary, model.spec.dtype, model.spec.cache_length
    if drawing is None:
        return model.beside(next_token_ir, *sizes)
    return model.beside(sampled_token_ir, *sizes, drawing.tries, tuple(drawing.limits))
