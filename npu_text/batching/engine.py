"""What decoding many texts at once asks of a device; the scheduler knows no more of it than this.

A *lane* is a place in the batch, a *page* a piece of the cache for so many tokens of one text. The scheduler gives
lanes and pages out; an engine computes. Where nothing else is said, a lane that is not named in a call keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BatchEngine",
    "Chosen",
    "Filling",
    "LaneSampling",
    "LaneSteps",
    "MaskSource",
    "Prefill",
    "Stepped",
]


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

    @property
    def is_penalised(self) -> bool:
        """Whether choices depend on all tokens that the text has."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


@dataclass(slots=True)
class Chosen:
    """A token, and what was asked for with it.

    Attributes:
        token: Which.
        logprob: The natural logarithm of its probability, if asked for.
        best: Of the likeliest tokens, each with its logarithm, likeliest first.
    """

    token: int
    logprob: float | None = None
    best: tuple[tuple[int, float], ...] = ()


class MaskSource(Protocol):
    """Knows which tokens may be chosen for a text. It is asked late, while the device computes the logits."""

    def write_masks(self, places: Sequence[tuple[Any, int]], masks: NDArray[np.uint32]) -> None:
        """Writes the masks of several sources of one kind, this one among them.

        Args:
            places: The sources, each with its row.
            masks: Where to write, [R, ceil(V / 32)]: bit v % 32 of word v // 32 for the token v. Other rows stay.
        """


@dataclass(frozen=True)
class Prefill:
    """Tokens of one text that go into its cache at once. What follows them is for steps to choose.

    Attributes:
        lane: Whose.
        tokens: Which; at most the longest of `BatchEngine.chunks`.
        position: Of the first of them in the text.
        pages: Of the lane, in order, those included that these tokens are written to.
        scored: As `LaneSampling.best`, for the tokens that follow each of `tokens` in the prompt; None for none.
        following: The prompt's token behind these; None at its end. Of those that are scored.
    """

    lane: int
    tokens: Sequence[int]
    position: int
    pages: Sequence[int]
    scored: int | None = None
    following: int | None = None


class Filling(Protocol):
    """Tokens of prompts on their way into the cache."""

    def __call__(self) -> tuple[Chosen, ...]:
        """Waits for them.

        Returns:
            For each token the one that follows in the prompt, where these are scored; the prompt's last has none.
        """

    def is_done(self) -> bool:
        """Whether they are there, so that calling it does not wait."""


class LaneSteps(NamedTuple):
    """A step of N lanes, in columns: the place of a lane is the same in each.

    Nobody changes a column that is in here: if it is the same object as that of the step before, so is what it holds.

    Attributes:
        lanes: int64 [N], which.
        tokens: int64 [N], the last chosen token of each, which is not in the cache yet.
        positions: int64 [N], of these tokens in their texts.
        pages: Of each lane, in order, those included that its tokens are written to.
        guesses: For each lane, the guess of the tokens behind; nothing at all where nobody guesses.
        masks: Who tells the tokens that may be chosen behind `tokens`, for the places where not all may.
        sources: int64 [N], for a token that nobody knows yet the place, in the step before, of the lane whose choice it
            is, and -1 for a token that `tokens` has; None where it has all. So a step may be asked for while the one
            before runs, if that one has no guesses, and neither masks nor penalties depend on what it chooses.
    """

    lanes: NDArray[np.int64]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    pages: Sequence[tuple[int, ...]]
    guesses: Sequence[Sequence[int]] = ()
    masks: Sequence[tuple[MaskSource, int]] = ()
    sources: NDArray[np.int64] | None = None


class Stepped(NamedTuple):
    """What a step gave.

    Attributes:
        tokens: int64 [N], the next token of each lane.
        guessed: For places whose guess was right, the tokens behind those.
        told: For places that asked for log-probabilities, all their tokens with them.
    """

    tokens: NDArray[np.int64]
    guessed: Mapping[int, Sequence[int]] = {}
    told: Mapping[int, tuple[Chosen, ...]] = {}

    def chosen(self, place: int) -> tuple[Chosen, ...]:
        """All that was chosen for a lane."""
        if place in self.told:
            return self.told[place]
        return tuple(map(Chosen, (int(self.tokens[place]), *self.guessed.get(place, ()))))


class BatchEngine(Protocol):
    """Computes the steps of a batch.

    Attributes:
        lanes: How many texts run at once, at most.
        page_tokens: Tokens of a page.
        pages: How many pages there are to give out, by numbers from 0.
        context: Tokens of a text, at most.
        vocabulary: How many tokens there are.
        chunks: How many tokens of a text the functions that fill caches take, ascending.
        packs: By such a number of how many texts at once further functions take so many tokens each, ascending.
        guess: How many tokens a step takes for one lane, at most; 1 where it checks no guesses.
    """

    lanes: int
    page_tokens: int
    pages: int
    context: int
    vocabulary: int
    chunks: tuple[int, ...]
    packs: Mapping[int, tuple[int, ...]]
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

    def prefill(self, *parts: Prefill) -> Filling:
        """Puts tokens into the cache.

        Args:
            parts: One part of a text; or such of several, no more than `packs` has for the number of tokens that holds
                the longest of them, none of them scored. One may read what another writes, and comes to the same
                numbers as by itself.

        Returns:
            Waits for the result. Calls of these lanes before it is called are queued behind this one, and so is all
            that is filled in later. Steps of other lanes may overtake it, any number of them, and it may overtake those
            that were asked for before: no step that was not waited for may write to `pages`, nor to what they share.
        """

    def step(self, steps: LaneSteps) -> Callable[[], Stepped]:
        """The next tokens of several lanes, behind the step before, which may not have been waited for.

        Returns:
            Waits for the tokens; to be called before the step after the next one is asked for. What was guessed wrongly
            is as if it had not been given.
        """

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page, behind what was filled in so far and ahead of whatever is filled in next.

        No step that was not waited for may write to either.
        """
