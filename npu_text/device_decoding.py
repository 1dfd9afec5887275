"""Generation in which the device chooses each token and feeds it to the next step; the host reads along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from npu_text.chosen_steps import ChosenSteps
from npu_text.language_model import TokenSequence
from npu_text.sampling import Sampling
from npu_text.step_functions import Tensor

__all__ = ["decode_on_device"]

_AHEAD = 4  # steps that the device has been asked for beyond the one whose token is read


def decode_on_device(sequence: TokenSequence, sampling: Sampling, limit: int) -> Callable[[Tensor], Iterator[int]]:
    """Chooses the token at each step on the device, which is asked for some steps ahead.

    For models of which the device does all of a step, and updates caches in place (`LanguageModel.updates_in_place`).
    A token is read once its step has run, while the next ones are running. When the reader stops, steps that have been
    asked for still run: what they write to the caches lies behind the end of the sequence, where later tokens overwrite
    it before any of them looks.

    Args:
        sequence: What the tokens follow; a token joins it when the next one is asked for.
        sampling: How to choose.
        limit: The most tokens to give.

    Returns:
        What a `Decoding` gives. Its iterator raises DeviceError where the device failed, or gave logits that are no
        numbers.
    """
    return partial(_tokens, ChosenSteps(sequence, sampling), sequence, limit)


def _tokens(steps: ChosenSteps, sequence: TokenSequence, limit: int, logits: Tensor) -> Iterator[int]:
    token = steps.choice.choose(logits, sequence.last_position)
    yield token
    count = min(limit - 1, sequence.model.spec.cache_length - len(sequence.tokens))
    if count > 0:
        steps.start(token)
    running: deque[Callable[[], None]] = deque()
    try:
        for number in range(count):
            while len(running) < min(1 + _AHEAD, count - number):
                running.append(steps.launch())
            running.popleft()()
            sequence.tokens.append(token)
            token = steps.choice.chosen_after(sequence.last_position)
            yield token
    finally:
        while running:
            running.popleft()()
