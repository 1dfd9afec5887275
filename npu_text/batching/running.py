"""The texts that take part in every step, in columns, so that a step costs little for each of them.

A step may be asked for before anybody knows what the one before chose: then the columns are a step ahead of the texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from npu_text.batching.texts import Text

__all__ = ["RunningTexts"]

_NONE = np.empty(0, np.int64)
_KNOWN = -1  # where a token of the host's comes from


class RunningTexts:
    """Columns with a place for each text. They are replaced and never changed: who took one keeps what it was.

    Attributes:
        texts: Which.
        lanes, tokens, positions, sources: As `LaneSteps` has them, for the next step.
        last: int64 [N], the last position of each that is ever in the cache: behind it comes the last token.
        pages: Of each, as `LaneSteps` has them.
        guided: Places of those that follow a grammar.
        unseen: Whether the next step may be asked for before anybody knows the tokens of the one before.
    """

    def __init__(self, page_tokens: int, guess: int) -> None:
        """Nobody yet.

        Args:
            page_tokens: Of a page.
            guess: As `BatchEngine.guess`.
        """
        self.texts: list[Text] = []
        self.lanes = self.tokens = self.positions = self.sources = self.last = _NONE
        self.pages: tuple[tuple[int, ...], ...] = ()
        self.guided: list[int] = []
        self.unseen = True
        self._page_tokens, self._guess = page_tokens, guess
        self._due = _NONE  # positions from which on a text needs another page

    def add(self, texts: Sequence[Text]) -> None:
        """Takes texts of which all tokens but the last are in the cache."""
        self.texts = [*self.texts, *texts]
        self.lanes = _and(self.lanes, [-1 if text.lane is None else text.lane for text in texts])
        self.tokens = _and(self.tokens, [text.tokens[-1] for text in texts])
        positions = [len(text.tokens) - 1 for text in texts]
        self.positions = _and(self.positions, positions)
        self.sources = _and(self.sources, [_KNOWN] * len(texts))
        self.last = _and(self.last, [len(text.request.prompt) + text.request.limit - 2 for text in texts])
        self._due = _and(self._due, positions)
        self._look()

    def drop_ended(self) -> None:
        """Leaves out the texts that have ended."""
        self._keep(np.array([not text.finish for text in self.texts], bool))

    def asked(self) -> None:
        """A step was asked for: what follows goes on from its choices. Texts whose last token it is are left out."""
        left = self.positions < self.last
        self.sources, self.positions = np.arange(len(self.texts)), self.positions + 1
        if not left.all():
            self._keep(left)

    def know(self, tokens: NDArray[np.int64], more: Mapping[int, int]) -> None:
        """The step that was asked for last is over.

        Args:
            tokens: The last token of each of its texts by now.
            more: For its places that got more than one token, how many more.
        """
        self.tokens = np.where(self.sources < 0, self.tokens, tokens[self.sources]) if len(tokens) else self.tokens
        if more:
            added = [more.get(place, 0) for place in self.sources.tolist()]
            self.positions = self.positions + np.array(added, np.int64)
        self.sources = np.full(len(self.texts), _KNOWN)

    def make_room(self) -> None:
        """Has pages for the next step, and tells which pages are full, those aside that a step under way fills."""
        due = np.flatnonzero(self.positions >= self._due)
        if not len(due):
            return
        for place in due.tolist():
            text, position = self.texts[place], int(self.positions[place])
            if text.table is not None:  # else it was cancelled
                text.table.fill(text.tokens[: position - (self.sources[place] >= 0)])
                text.table.room(position + 1)
            self._due[place] = (position // self._page_tokens + 1) * self._page_tokens
        self.look_at_pages()

    def look_at_pages(self) -> None:
        """To be called when texts have other pages."""
        self.pages = tuple(() if text.table is None else text.table.pages for text in self.texts)

    def _keep(self, keep: NDArray[np.bool_]) -> None:
        self.texts = [text for text, stays in zip(self.texts, keep.tolist(), strict=True) if stays]
        self.lanes, self.tokens, self.positions = self.lanes[keep], self.tokens[keep], self.positions[keep]
        self.sources, self.last, self._due = self.sources[keep], self.last[keep], self._due[keep]
        self._look()

    def _look(self) -> None:
        self.look_at_pages()
        self.unseen = not any(
            text.request.grammar is not None
            or text.request.sampling.is_penalised
            or (self._guess > 1 and text.request.guesser is not None)
            for text in self.texts
        )
        self.guided = [place for place, text in enumerate(self.texts) if text.request.grammar is not None]


def _and(column: NDArray[np.int64], more: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate((column, np.array(more, np.int64)))
