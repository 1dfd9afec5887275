"""The texts that take part in every step, in columns, so that a step costs little for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from npu_text.batching.texts import Text

__all__ = ["RunningTexts"]

_NONE = np.empty(0, np.int64)


class RunningTexts:
    """Columns with a place for each text. They are replaced and never changed: who took one keeps what it was.

    Attributes:
        texts: Which.
        lanes, tokens, positions: As `LaneSteps` has them.
        last: int64 [N], the last position of each that is ever in the cache: behind it comes the last token.
        pages: Of each, as `LaneSteps` has them.
        guided: Places of those that follow a grammar.
    """

    def __init__(self, page_tokens: int) -> None:
        self.texts: list[Text] = []
        self.lanes = self.tokens = self.positions = self.last = _NONE
        self.pages: tuple[tuple[int, ...], ...] = ()
        self.guided: list[int] = []
        self._page_tokens = page_tokens
        self._due = _NONE  # positions from which on a text needs another page
        self._ahead = -1  # steps for which there are pages, beside the next one

    def add(self, texts: Sequence[Text]) -> None:
        """Takes texts of which the first token was chosen."""
        self.texts = [*self.texts, *texts]
        self.lanes = _and(self.lanes, [-1 if text.lane is None else text.lane for text in texts])
        self.tokens = _and(self.tokens, [text.tokens[-1] for text in texts])
        positions = [len(text.tokens) - 1 for text in texts]
        self.positions = _and(self.positions, positions)
        self.last = _and(self.last, [len(text.request.prompt) + text.request.limit - 2 for text in texts])
        self._due = _and(self._due, positions)
        self._ahead = -1
        self._look()

    def drop_ended(self) -> None:
        """Leaves out the texts that have ended."""
        keep = np.array([not text.finish for text in self.texts], bool)
        self.texts = [text for text in self.texts if not text.finish]
        self.lanes, self.tokens, self.positions = self.lanes[keep], self.tokens[keep], self.positions[keep]
        self.last, self._due = self.last[keep], self._due[keep]
        self._look()

    def go_on(self, tokens: NDArray[np.int64], more: Sequence[tuple[int, int]]) -> None:
        """A step is over.

        Args:
            tokens: The last token of each text by now.
            more: Places that got more than one token, each with how many more.
        """
        self.tokens, self.positions = tokens, self.positions + 1
        self._ahead = -1 if more else self._ahead - 1
        for place, count in more:
            self.positions[place] += count

    def make_room(self, ahead: int) -> None:
        """Has pages for the next step and `ahead` more, and tells which pages are full by then."""
        if ahead <= self._ahead:
            return
        self._ahead = ahead
        positions = np.minimum(self.positions + ahead, self.last)
        due = np.flatnonzero(positions >= self._due)
        if not len(due):
            return
        for place in due.tolist():
            text, position = self.texts[place], int(positions[place])
            if text.table is not None:  # else it was cancelled
                text.table.fill(text.tokens[:position])
                text.table.room(position + 1)
            self._due[place] = (position // self._page_tokens + 1) * self._page_tokens
        self.look_at_pages()

    def look_at_pages(self) -> None:
        """To be called when texts have other pages."""
        self.pages = tuple(() if text.table is None else text.table.pages for text in self.texts)

    def _look(self) -> None:
        self.look_at_pages()
        self.guided = [place for place, text in enumerate(self.texts) if text.request.grammar is not None]


def _and(column: NDArray[np.int64], more: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate((column, np.array(more, np.int64)))
