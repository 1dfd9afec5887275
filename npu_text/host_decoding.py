"""Generation in which the host asks for a step when the token behind the last one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from npu_compiler.graph.page_copies import staging_ir
from npu_runtime.backend import DeviceBuffer
from npu_runtime.buffer import NPUBuffer
from npu_text.language_model import TokenSequence
from npu_text.sampling import Sampler
from npu_text.step_choice import StepChoice
from npu_text.step_functions import Tensor, device_buffer, visible

__all__ = ["decode_on_host"]

_GIVEN = (("tokens", (1, 1), "int64"), ("positions", (1,), "int64"))


def decode_on_host(sequence: TokenSequence, sampler: Sampler, limit: int) -> Callable[[Tensor], Iterator[int]]:
    """Takes a token from the host, and gives it the next one, step by step.

    Where the device does all of a step and updates caches in place, it also chooses, and all of that is one replay;
    elsewhere the host chooses from the logits.
    """
    return (_replayed if sequence.model.updates_in_place else _computed)(sequence, sampler)


def _computed(sequence: TokenSequence, sampler: Sampler) -> Callable[[Tensor], Iterator[int]]:
    def tokens(logits: Tensor) -> Iterator[int]:
        while True:
            token = sampler.choose_from(logits, len(sequence.tokens))
            yield token
            logits = sequence.advance([token])

    return tokens


def _replayed(sequence: TokenSequence, sampler: Sampler) -> Callable[[Tensor], Iterator[int]]:
    step = _ReplayedStep(sequence, sampler)

    def tokens(logits: Tensor) -> Iterator[int]:
        token = step.chosen_from(logits)
        while True:
            yield token
            token = step.chosen_after(token)

    return tokens


class _ReplayedStep:
    """The function for one token and the choice behind it, from memory that the host writes to memory that it reads."""

    def __init__(self, sequence: TokenSequence, sampler: Sampler) -> None:
        model = self._model = sequence.model
        self._sequence = sequence
        self._choice = StepChoice(model, sampler)
        self._made = self._choice.made()
        self._staging = model.beside(staging_ir, _GIVEN)
        given = {spec.name: visible(model.device, spec) for spec in self._staging.plan.inputs}
        self._token, self._position = (given[name][0] for name, *_ in _GIVEN)
        self._given = {name: buffer for name, (_, buffer) in given.items()}
        self._there = {spec.name: device_buffer(model.device, spec) for spec in self._staging.plan.outputs}
        self._recorded_for: Sequence[Tensor] = ()
        self._memory: list[DeviceBuffer] = []
        self._record()

    def chosen_from(self, logits: Tensor) -> int:
        """The token that follows the sequence, whose last token gave these logits."""
        return self._choice.choose(logits, len(self._sequence.tokens) - 1)

    def chosen_after(self, token: int) -> int:
        """The token that follows one more token of the sequence."""
        sequence, position = self._sequence, len(self._sequence.tokens)
        if sequence.caches is not self._recorded_for:
            self._record()
        self._token[...], self._position[...] = token, position
        sequence.append([token])
        self._recording.replay(sync=True, stream=None)
        return self._choice.chosen_after(position)

    def _record(self) -> None:
        """Makes the step ready for the caches of the sequence, if it is not for their memory."""
        caches = [cache for cache in self._sequence.caches if isinstance(cache, NPUBuffer)]
        memory = [cache.data for cache in caches]
        if memory != self._memory:
            tokens, positions = (self._there[f"{name}_there"] for name, *_ in _GIVEN)
            step, logits = self._model.bind_step(tokens, positions, caches)
            staged = self._staging.bind(self._given, self._there)
            chosen = self._choice.bind(logits, positions, self._made)
            self._recording = self._model.device.backend.record([staged, step, chosen])
        self._recorded_for, self._memory = self._sequence.caches, memory
