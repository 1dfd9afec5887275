"""Greedy generation in which the device chooses each token and feeds it to the next step; the host reads along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from npu_compiler.layout import BufferSpec
from npu_compiler.next_token import NO_NUMBER
from npu_runtime.backend import Recording
from npu_runtime.buffer import NPUBuffer
from npu_runtime.language_model import LanguageModel, TokenSequence
from npu_runtime.sampling import Sampler, not_a_number
from npu_runtime.step_functions import Tensor

__all__ = ["can_decode_on_device", "decode_on_device"]

_AHEAD = 4  # steps that the device has been asked for beyond the one whose token is read


def can_decode_on_device(model: LanguageModel, sampler: Sampler) -> bool:
    """Whether `decode_on_device` works: greedily, where the device does all of a step and updates caches in place."""
    step, function = model.step(1)
    in_place = function.plan is not None and set(step.caches) == {(name, out) for out, name in function.plan.state}
    return in_place and sampler.sampling.temperature == 0


def decode_on_device(sequence: TokenSequence, sampler: Sampler, limit: int) -> Callable[[Tensor], Iterator[int]]:
    """Chooses the likeliest token at each step on the device, which is asked for some steps ahead.

    A token is read once its step has run, while the next ones are running. When the reader stops, steps that have been
    asked for still run: what they write to the caches lies behind the end of the sequence, where later tokens overwrite
    it before any of them looks.

    Args:
        sequence: What the tokens follow; a token joins it when the next one is asked for.
        sampler: A greedy one.
        limit: The most tokens to give.

    Returns:
        What a `Decoding` gives. Its iterator raises DeviceError where the device failed, or gave logits that are no
        numbers.
    """
    return partial(_tokens, _Loop(sequence), sequence, sampler, limit)


def _tokens(loop: _Loop, sequence: TokenSequence, sampler: Sampler, limit: int, logits: Tensor) -> Iterator[int]:
    token = sampler.choose_from(logits)
    yield token
    steps = min(limit - 1, sequence.model.spec.cache_length - len(sequence.tokens))
    if steps > 0:
        loop.record(sequence)
        loop.start(token, len(sequence.tokens))
    running: deque[Callable[[], None]] = deque()
    try:
        for number in range(steps):
            while len(running) < min(1 + _AHEAD, steps - number):
                running.append(loop.launch())
            running.popleft()()
            sequence.tokens.append(token)
            token = loop.chosen_after(len(sequence.tokens) - 1)
            yield token
    finally:
        for wait in running:
            wait()


class _Loop:
    """Decode steps, each followed by the choice of the next token.

    Tokens and positions have two places each: a step reads one, and the choice behind it writes the other.
    """

    def __init__(self, sequence: TokenSequence) -> None:
        model = self._model = sequence.model
        choice = model.next_token()
        ins = {spec.name: spec for spec in choice.plan.inputs}
        outs = {spec.name: spec for spec in choice.plan.outputs}
        memory = model.device.backend.allocate_visible(ins["chosen"].nbytes)
        self._chosen = NPUBuffer(model.device, memory, ins["chosen"])
        self._tokens = [self._empty(outs["tokens"]) for _ in range(2)]
        self._positions = [self._empty(outs["next_positions"]) for _ in range(2)]
        self._turn = 0
        self._caches: list[NPUBuffer] = []
        self._recordings: list[Recording] = []
        self.record(sequence)

    def record(self, sequence: TokenSequence) -> None:
        """Makes steps ready for the caches of a sequence, if they are not for these very ones."""
        caches = [cache for cache in sequence.caches if isinstance(cache, NPUBuffer)]
        if [cache.data for cache in caches] != [cache.data for cache in self._caches]:
            self._caches = caches
            self._recordings = [self._record(turn) for turn in range(2)]

    def _empty(self, spec: BufferSpec) -> NPUBuffer:
        return NPUBuffer(self._model.device, self._model.device.backend.allocate(spec.nbytes), spec)

    def _record(self, turn: int) -> Recording:
        """A step that reads the tokens and positions of a turn, and the choice that writes those of the other."""
        step, decode = self._model.step(1)
        assert decode.bind is not None
        assert decode.plan is not None
        logits = self._empty(next(spec for spec in decode.plan.outputs if spec.name == step.logits))
        positions = self._positions[turn]
        given = {name: cache for (name, _), cache in zip(step.caches, self._caches, strict=True)}
        given |= {step.tokens: self._tokens[turn], step.positions: positions}
        bound = decode.bind(given, {step.logits: logits})
        chosen = self._model.next_token().bind(
            {"logits": logits, "positions": positions, "chosen": self._chosen},
            {"tokens": self._tokens[1 - turn], "next_positions": self._positions[1 - turn]},
        )
        return self._model.device.backend.record([bound, chosen])

    def start(self, token: int, position: int) -> None:
        """Makes the next step take this token."""
        for buffer, value in ((self._tokens, token), (self._positions, position)):
            given = buffer[self._turn]
            self._model.device.backend.write(np.full(given.shape, value, np.int64), given.spec, given.data)

    def launch(self) -> Callable[[], None]:
        """Asks for one step, and gives what waits for it."""
        recording = self._recordings[self._turn]
        self._turn = 1 - self._turn
        return recording.launch()

    def chosen_after(self, position: int) -> int:
        """The token that a step which has run chose to follow the one at `position`."""
        spec = self._chosen.spec
        token = int(spec.layout.view(self._chosen.data.reading().view(spec.dtype.numpy))[position])
        if token == NO_NUMBER:
            raise not_a_number("no number")
        return token
