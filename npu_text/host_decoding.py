"""Generation in which the host asks for a step when the token behind the last one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from npu_text.chosen_steps import ChosenSteps
from npu_text.language_model import TokenSequence
from npu_text.sampling import Sampling
from npu_text.step_functions import Tensor
from npu_text.token_choice import TokenChoice

__all__ = ["decode_on_host"]


def decode_on_host(sequence: TokenSequence, sampling: Sampling, limit: int) -> Callable[[Tensor], Iterator[int]]:
    """Hands each token on to the next step, which is asked for when the token behind it is.

    Where the device does all of a step and updates caches in place, a step and the choice behind it are one replay;
    elsewhere the device chooses from the logits, wherever they are.
    """
    return (_run if sequence.model.updates_in_place else _computed)(sequence, sampling)


def _run(sequence: TokenSequence, sampling: Sampling) -> Callable[[Tensor], Iterator[int]]:
    steps = ChosenSteps(sequence, sampling)

    def tokens(logits: Tensor) -> Iterator[int]:
        token = steps.choice.choose(logits, sequence.last_position)
        while True:
            yield token
            token = steps.run(token)

    return tokens


def _computed(sequence: TokenSequence, sampling: Sampling) -> Callable[[Tensor], Iterator[int]]:
    choice = TokenChoice(sequence.model, sampling)

    def tokens(logits: Tensor) -> Iterator[int]:
        while True:
            token = choice.choose(logits, sequence.last_position)
            yield token
            logits = sequence.advance([token])

    return tokens
