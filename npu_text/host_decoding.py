"""Generation in which the host asks for a step when the token behind the last one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from npu_text.chosen_steps import ChosenSteps
from npu_text.language_model import TokenSequence
from npu_text.sampling import Sampler
from npu_text.step_functions import Tensor

__all__ = ["decode_on_host"]


def decode_on_host(sequence: TokenSequence, sampler: Sampler, limit: int) -> Callable[[Tensor], Iterator[int]]:
    """Hands each token on to the next step, which is asked for when the token behind it is.

    Where the device does all of a step and updates caches in place, it also chooses, and all of that is one replay;
    elsewhere the host chooses from the logits.
    """
    return (_run if sequence.model.updates_in_place else _computed)(sequence, sampler)


def _run(sequence: TokenSequence, sampler: Sampler) -> Callable[[Tensor], Iterator[int]]:
    steps = ChosenSteps(sequence, sampler)

    def tokens(logits: Tensor) -> Iterator[int]:
        token = steps.chosen_from(logits)
        while True:
            yield token
            token = steps.run(token)

    return tokens


def _computed(sequence: TokenSequence, sampler: Sampler) -> Callable[[Tensor], Iterator[int]]:
    def tokens(logits: Tensor) -> Iterator[int]:
        while True:
            token = sampler.choose_from(logits, len(sequence.tokens))
            yield token
            logits = sequence.advance([token])

    return tokens
