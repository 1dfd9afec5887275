"""What decoding many texts at once asks of a device; the scheduler knows no more of it than this.

A *lane* is a place in the batch, a *page* a piece of the cache for so many tokens of one text. The scheduler gives
lanes and pages out; an engine computes. Where nothing else is said, a lane that is not named in a call keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["BatchEngine", "Chosen", "LaneSampling", "LaneStep", "Prefill", "Prefilled"]


@dataclass(frozen=True)
class LaneSampling:
    """How the tokens of one text are chosen.

    The order: logit bias and mask, penalties, temperature, top-k, top-p of what is left, min-p of what is left. The
    random numbers depend on the seed and on the position alone, not on the lane nor on its neighbours.

    Attributes:
        temperature: Divides the logits; 0 takes the highest, the first of equals.
        top_k: Choose among so many of the highest; 0 for all.
        top_p: Choose among the fewest of the highest whose probabilities reach this together; 1 for all.
        min_p: Leave out tokens less probable than this share of the likeliest one.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens of the prompt and the text.
        presence_penalty: Subtracted from the logits of tokens that the text has.
        frequency_penalty: Subtracted as many times as the text has the token.
        logit_bias: Added to the logits of these tokens.
        seed: Equal seeds give equal choices from equal logits.
        best: Of how many of the likeliest tokens the logarithms of their probabilities come back; None for none at all,
            0 for that of the chosen one. They are those of the logits as the model made them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    best: int | None = None


class Chosen(NamedTuple):
    """A token, and what was asked for with it.

    Attributes:
        token: Which.
        logprob: The natural logarithm of its probability, if asked for.
        best: Of the likeliest tokens, each with its logarithm, likeliest first.
    """

    token: int
    logprob: float | None = None
    best: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Prefill:
    """Tokens of one text that go into its cache at once.

    Attributes:
        lane: Whose.
        tokens: Which; at most the longest of `BatchEngine.chunks`.
        position: Of the first of them in the text.
        pages: Of the lane, in order, those included that these tokens are written to.
        choose: Whether the token that follows is to be chosen, as behind a prompt's last part.
        mask: uint32 [ceil(V / 32)], the tokens that may be chosen, bit v % 32 of word v // 32; None for all.
        scored: As `LaneSampling.best`, for the tokens that follow each of `tokens` in the prompt; None for none.
        following: The prompt's token behind these; None at its end. Of those that are scored.
    """

    lane: int
    tokens: Sequence[int]
    position: int
    pages: Sequence[int]
    choose: bool = True
    mask: NDArray[np.uint32] | None = None
    scored: int | None = None
    following: int | None = None


class Prefilled(NamedTuple):
    """What `Prefill` gave.

    Attributes:
        chosen: The token that follows, if asked for.
        scores: For each token the one that follows in the prompt, if asked for; the prompt's last has none.
    """

    chosen: Chosen | None
    scores: tuple[Chosen, ...] = ()


@dataclass(frozen=True)
class LaneStep:
    """One lane's part of a step.

    Attributes:
        lane: Which.
        tokens: The last chosen token, which is not in the cache yet, and behind it the guess of those that follow.
        position: Of the first of them in the text.
        pages: Of the lane, in order, those included that the tokens are written to.
        mask: As in `Prefill`, for the token behind the first; a guess goes with no mask.
    """

    lane: int
    tokens: Sequence[int]
    position: int
    pages: Sequence[int]
    mask: NDArray[np.uint32] | None = None


class BatchEngine(Protocol):
    """Computes the steps of a batch.

    Attributes:
        lanes: How many texts run at once, at most.
        page_tokens: Tokens of a page.
        pages: How many pages there are to give out, by numbers from 0.
        context: Tokens of a text, at most.
        vocabulary: How many tokens there are.
        chunks: How many tokens the functions that fill caches take, ascending.
        guess: How many tokens a step takes for one lane, at most; 1 where it checks no guesses.
    """

    lanes: int
    page_tokens: int
    pages: int
    context: int
    vocabulary: int
    chunks: tuple[int, ...]
    guess: int

    def check(self, sampling: LaneSampling, scored: int | None, masked: bool) -> None:
        """Refuses texts that are beyond this engine, before they get a lane; any thread may ask.

        Args:
            sampling: How tokens are to be chosen.
            scored: As in `Prefill`.
            masked: Whether there will be masks.

        Raises:
            InputError: What it cannot do.
        """

    def begin(self, lane: int, sampling: LaneSampling, tokens: Sequence[int]) -> None:
        """A text takes a lane.

        Args:
            lane: Which, free until now.
            sampling: How its tokens are chosen.
            tokens: Of the prompt, as penalties count them.
        """

    def prefill(self, part: Prefill) -> Callable[[], Prefilled]:
        """Puts tokens into the cache.

        Returns:
            Waits for the result. Calls before it is called are queued behind this one.
        """

    def step(self, steps: Sequence[LaneStep]) -> Callable[[], Sequence[tuple[Chosen, ...]]]:
        """The next tokens of several lanes.

        Returns:
            Waits for the tokens of each step, in the order given: one, and more where a guess was right so far. What
            was guessed wrongly is as if it had not been given.
        """

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page, ahead of whatever is asked for next."""
