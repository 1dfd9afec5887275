"""Texts that run together: what is asked for, what has become of it, and what a device is to do for them next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from npu_text.batching.engine import Chosen, LaneSampling, LaneSteps, MaskSource, Prefill, Stepped
from npu_text.batching.pages import PageTable

__all__ = ["Counters", "Event", "Fill", "Grammar", "Guesser", "Limits", "News", "Text", "TextRequest", "Turn"]


class Guesser(Protocol):
    """Guesses how one text goes on."""

    def guess(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """At most so many tokens that may follow a text, which has grown since it was last asked about."""

    def learn(self, guessed: int, right: int) -> None:
        """How many of the guessed tokens were right."""


class Grammar(MaskSource, Protocol):
    """What a text may say next.

    Attributes:
        ended: Whether nothing may follow but the end.
    """

    @property
    def ended(self) -> bool: ...

    def take(self, token: int) -> None:
        """Goes on behind `token`."""


@dataclass(frozen=True)
class TextRequest:
    """A text to be continued.

    Attributes:
        prompt: Its tokens.
        limit: So many tokens are added at most; 0 where only the prompt is to be scored.
        sampling: How they are chosen.
        stop: Tokens that end it; such a one is given as the last.
        priority: Lower ones start first.
        patience: Seconds for which it may wait to start.
        scored: As `Prefill.scored`, for the prompt.
        grammar: What may follow.
        guesser: Guesses what follows, where the engine checks guesses; of this text alone.
    """

    prompt: tuple[int, ...]
    limit: int
    sampling: LaneSampling = field(default_factory=LaneSampling)
    stop: frozenset[int] = frozenset()
    priority: int = 0
    patience: float = math.inf
    scored: int | None = None
    grammar: Grammar | None = None
    guesser: Guesser | None = None


@dataclass(eq=False, slots=True)
class Text:
    """A text on its way.

    Attributes:
        request: What was asked for.
        tokens: The prompt, and what was added.
        lane: Where it runs; None before and after.
        filled: How many tokens are in the cache, or on their way into it; of the prompt, while it runs. Its last one
            goes in by the step that chooses the text's first token.
        shared: How many of them others had computed.
        parts: Of its prompt, how many are under way into the cache.
        finish: Why it ended: ``stop`` (a stop token), ``complete`` (its grammar allows no more), ``length``,
            ``cancelled`` or ``late`` (it waited for too long); empty before.
        arrived: When, as `Scheduler` was told.
        serial: How many came before it.
    """

    request: TextRequest
    tokens: list[int]
    arrived: float
    serial: int
    lane: int | None = None
    table: PageTable | None = None
    filled: int = 0
    shared: int = 0
    parts: int = 0
    finish: str = ""

    @property
    def added(self) -> int:
        """How many tokens were added to the prompt."""
        return len(self.tokens) - len(self.request.prompt)


@dataclass(slots=True)
class Event:
    """News of a text.

    Attributes:
        text: Which.
        chosen: Tokens that were added.
        finish: As `Text.finish`.
        scores: Of tokens of the prompt, in order; of the first None.
    """

    text: Text
    chosen: tuple[Chosen, ...] = ()
    finish: str = ""
    scores: tuple[Chosen | None, ...] = ()


class News(NamedTuple):
    """What came of a turn; as `Event` objects when there is time to make them.

    Attributes:
        filled: Of prompts.
        texts: That took part in a step.
        stepped: What it gave.
        counts: For places where it is not all of that, how many tokens were added.
        finishes: For places of texts that ended, why.
    """

    filled: Sequence[Event] = ()
    texts: Sequence[Text] = ()
    stepped: Stepped | None = None
    counts: Mapping[int, int] = {}
    finishes: Mapping[int, str] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.filled or self.texts)

    def events(self) -> list[Event]:
        """One for each text that something happened to."""
        events = list(self.filled)
        if self.stepped is None:
            return events
        if self.stepped.guessed or self.stepped.told:
            chosen = [self.stepped.chosen(place) for place in range(len(self.texts))]
        else:
            chosen = [(Chosen(token),) for token in self.stepped.tokens.tolist()]
        for place, count in self.counts.items():
            chosen[place] = chosen[place][:count]
        finishes = [""] * len(chosen)
        for place, finish in self.finishes.items():
            finishes[place] = finish
        events += [event for event in map(Event, self.texts, chosen, finishes) if event.chosen]
        return events


class Fill(NamedTuple):
    """Parts of prompts that are to go into the cache at once, one of each text.

    Attributes:
        texts: Whose.
        copies: Pages that are to be copied ahead of it, for the first of them: arguments of `BatchEngine.copy_page`.
        parts: The arguments of `BatchEngine.prefill`.
        length: How many tokens of each text the function takes that takes them.
    """

    texts: Sequence[Text]
    copies: Sequence[tuple[int, int]]
    parts: Sequence[Prefill]
    length: int

    @property
    def tokens(self) -> int:
        """That the function takes, of all texts."""
        return len(self.texts) * self.length


@dataclass
class Turn:
    """What to ask of the device, in this order.

    Attributes:
        begins: Lanes that texts take: arguments of `BatchEngine.begin`.
        fills: Parts of prompts; they may still be under way when the steps are over, and others begin.
        steps: The next tokens of what runs; None where nothing does.
        running: Whose `steps` are.
        full: Places of those that have all their tokens then.
        late: Texts that waited for too long.
        alone: Whether no parts of prompts are under way meanwhile.
    """

    begins: list[tuple[int, LaneSampling, Sequence[int]]] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    steps: LaneSteps | None = None
    running: Sequence[Text] = ()
    full: Sequence[int] = ()
    late: list[Text] = field(default_factory=list)
    alone: bool = True

    def __bool__(self) -> bool:
        """Whether the device is asked for anything."""
        return bool(self.fills or self.running)


@dataclass(frozen=True)
class Limits:
    """What a scheduler takes.

    Attributes:
        waiting: Texts that may wait, at most.
        chunk: Tokens of prompts between two steps, at most; None for as many as the engine takes at once. How a prompt
            is divided depends on this and on what it shares, never on who else runs.
        share: Whether texts that begin alike share pages.
    """

    waiting: int = 1024
    chunk: int | None = None
    share: bool = True


@dataclass
class Counters:
    """What happened so far: texts by how they ended, tokens of prompts, those that others had computed, tokens added,
    and guesses made and kept."""

    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    shared_tokens: int = 0
    added_tokens: int = 0
    guessed: int = 0
    kept: int = 0
