"""Texts as they come from the scheduler, made readable: no character split, nothing of a stop string given."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from npu_text.batching.engine import Chosen
from npu_text.batching.texts import Event, Text
from npu_text.serving.vocabulary import Vocabulary
from npu_text.tokenizer import TextStream

__all__ = ["Answer", "Answers", "Piece", "StopStrings"]


class Piece(NamedTuple):
    """Part of an answer.

    Attributes:
        text: What is new; may be empty.
        tokens: Those that it came from, each with the place in the answer's text where it begins.
        finish: Why the answer ends; empty before. ``stop``, ``length``, ``cancelled``, ``late`` or ``failed``.
        scores: Of tokens of the prompt.
    """

    text: str = ""
    tokens: tuple[tuple[Chosen, int], ...] = ()
    finish: str = ""
    scores: tuple[Chosen | None, ...] = ()


@dataclass
class StopStrings:
    """Finds strings in a text that comes in pieces.

    Attributes:
        strings: Which.
    """

    strings: Sequence[str]
    _held: str = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What can be given away by now, and whether a string was found; what follows one is dropped."""
        held = self._held + text
        found = [at for at in (held.find(string) for string in self.strings) if at >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        keep = max((_overlap(held, string) for string in self.strings), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """What was held back, when nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of a text begin a string."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)


class Answer:
    """One text in the making, read in an event loop.

    Attributes:
        text: What the scheduler knows of it.
        tokens: How many were chosen for it so far.
        finished: Whether all of it was read.
    """

    def __init__(self, text: Text, vocabulary: Vocabulary, stop: Sequence[str], places: bool) -> None:
        """An answer of which nothing is there yet.

        Args:
            text: What the scheduler knows of it.
            vocabulary: Reads its tokens.
            stop: Strings that end it.
            places: Whether its pieces are to tell their tokens, too, which takes longer.
        """
        self.text, self.tokens, self.finished = text, 0, False
        self._stream, self._stop, self._places = TextStream(vocabulary.tokenizer), StopStrings(stop), places
        self._length = 0  # characters that tokens stand for so far
        self._news: list[Event] = []

    def push(self, event: Event) -> None:
        """Takes news."""
        if not self.finished:
            self._news.append(event)

    def read(self) -> Piece | None:
        """All that came since, if anything did."""
        news, self._news = self._news, []
        if not news:
            return None
        chosen, finish = [one for event in news for one in event.chosen], news[-1].finish
        self.tokens += len(chosen)
        if finish == "stop":
            chosen.pop()  # a token that ends texts is none of the text
        elif finish == "complete":
            finish = "stop"
        texts: list[str] = []
        tokens: list[tuple[Chosen, int]] = []
        found = self._take(chosen, texts, tokens)
        if found:
            finish = "stop"
        elif finish:
            given, found = self._stop.push(self._stream.flush())
            texts += [given] if found else [given, self._stop.flush()]
            finish = "stop" if found else finish
        self.finished = bool(finish)
        piece = Piece("".join(texts), tuple(tokens), finish, tuple(score for event in news for score in event.scores))
        return piece if any(piece) else None

    def _take(self, chosen: list[Chosen], texts: list[str], tokens: list[tuple[Chosen, int]]) -> bool:
        """Makes text of tokens; gives whether it has a stop string."""
        for group in [[one] for one in chosen] if self._places else [chosen] if chosen else []:
            text = self._stream.push(*(one.token for one in group))
            if self._places:
                tokens.append((group[0], self._length))
            self._length += len(text)
            given, found = self._stop.push(text)
            texts.append(given)
            if found:
                return True
        return False


class Answers:
    """The answers to one request, of which there may be several."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.all = list(answers)
        self._some = asyncio.Event()

    def wake(self) -> None:
        """Says that one of them has news."""
        self._some.set()

    async def pieces(self, patience: float = math.inf) -> AsyncIterator[tuple[int, Piece] | None]:
        """What comes, with the number of the answer that it belongs to; each ends with a piece that has a `finish`.

        Args:
            patience: When nothing came for so many seconds, None is given.
        """
        loop = asyncio.get_running_loop()
        latest = loop.time()
        timer = None if patience == math.inf else loop.call_later(patience, self._some.set)
        try:
            while not all(answer.finished for answer in self.all):
                await self._some.wait()
                self._some.clear()
                for number, answer in enumerate(self.all):
                    piece = answer.read()
                    if piece is not None:
                        latest = loop.time()
                        yield number, piece
                if timer is not None and loop.time() >= timer.when():  # one timer, not one for each piece
                    if loop.time() - latest >= patience:
                        yield None
                        latest = loop.time()
                    timer = loop.call_at(latest + patience, self._some.set)
        finally:
            if timer is not None:
                timer.cancel()
