"""Texts as they come from the scheduler, made readable: no character split, nothing of a stop string given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from npu_text.batching.engine import Chosen
from npu_text.batching.scheduler import Event, Text
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

    def __init__(self, text: Text, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
        """With the strings that end it."""
        self.text, self.tokens, self.finished = text, 0, False
        self._stream, self._stop = TextStream(vocabulary), StopStrings(stop)
        self._length = 0  # characters that tokens stand for so far
        self._news: list[Event] = []

    def push(self, event: Event) -> None:
        """Takes news."""
        if not self.finished:
            self._news.append(event)

    def read(self) -> Piece | None:
        """All that came since, if anything did."""
        news, self._news = self._news, []
        scores = tuple(score for event in news for score in event.scores)
        texts: list[str] = []
        tokens: list[tuple[Chosen, int]] = []
        finish = ""
        for event in news:
            finish = self._take(event, texts, tokens)
            if finish:
                self.finished = True
                break
        piece = Piece("".join(texts), tuple(tokens), finish, scores)
        return piece if any(piece) else None

    def _take(self, event: Event, texts: list[str], tokens: list[tuple[Chosen, int]]) -> str:
        """Reads one piece of news; gives why the text ends, if it does."""
        chosen = list(event.chosen)
        self.tokens += len(chosen)
        if event.finish == "stop":
            chosen.pop()  # a token that ends texts is none of the text
        for one in chosen:
            text = self._stream.push(one.token)
            tokens.append((one, self._length))
            self._length += len(text)
            given, found = self._stop.push(text)
            texts.append(given)
            if found:
                return "stop"
        if not event.finish:
            return ""
        given, found = self._stop.push(self._stream.flush())
        texts += [given] if found else [given, self._stop.flush()]
        return "stop" if found else event.finish


class Answers:
    """The answers to one request, of which there may be several."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.all = list(answers)
        self._some = asyncio.Event()

    def wake(self) -> None:
        """Says that one of them has news."""
        self._some.set()

    async def pieces(self, patience: float | None = None) -> AsyncIterator[tuple[int, Piece] | None]:
        """What comes, with the number of the answer that it belongs to; each ends with a piece that has a `finish`.

        Args:
            patience: When nothing came for so many seconds, None is given.
        """
        while not all(answer.finished for answer in self.all):
            try:
                await asyncio.wait_for(self._some.wait(), patience)
            except TimeoutError:
                yield None
                continue
            self._some.clear()
            for number, answer in enumerate(self.all):
                piece = answer.read()
                if piece is not None:
                    yield number, piece
