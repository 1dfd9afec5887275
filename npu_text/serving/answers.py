"""Texts as they come from the scheduler, made readable: no character split, nothing of a stop string given."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from npu_text.batching.engine import Chosen
from npu_text.batching.texts import Event, Text
from npu_text.serving.vocabulary import Vocabulary
from npu_text.tokenizer import TextStream

__all__ = ["Answer", "Answers", "Piece", "StopStrings"]


@dataclass(slots=True)
class Piece:
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

    @property
    def is_text(self) -> bool:
        """Whether it is text and nothing else."""
        return not (self.tokens or self.finish or self.scores)


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
        if not self.strings:
            return text, False
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
        self._is_plain = not (stop or places or text.request.scored is not None)
        self._length = 0  # characters that tokens stand for so far
        self._news: list[Event] = []

    def push(self, event: Event) -> bool:
        """Takes news; gives whether they are the first since the last `read`."""
        if self.finished:
            return False
        self._news.append(event)
        return len(self._news) == 1

    def read(self) -> Piece | None:
        """All that came since, if anything did."""
        news, self._news = self._news, []
        if not news:
            return None
        chosen, finish = [one for event in news for one in event.chosen], news[-1].finish
        self.tokens += len(chosen)
        if self._is_plain and not finish:
            text = self._stream.push(*[one.token for one in chosen])
            return Piece(text) if text else None
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
        text, scores = "".join(texts), tuple([score for event in news for score in event.scores])
        return Piece(text, tuple(tokens), finish, scores) if text or tokens or finish or scores else None

    def _take(self, chosen: list[Chosen], texts: list[str], tokens: list[tuple[Chosen, int]]) -> bool:
        """Makes text of tokens; gives whether it has a stop string."""
        if not chosen:
            return False
        for group in [[one] for one in chosen] if self._places else [chosen]:
            text = self._stream.push(*[one.token for one in group])
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
        self._some: list[int] = []  # that have news
        self._waiter: asyncio.Future[None] | None = None
        self._is_quiet = False  # for as long as `pieces` is to wait

    def wake(self, number: int) -> None:
        """Says that one of them has news."""
        self._some.append(number)
        self._go_on()

    def _go_on(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _ring(self) -> None:
        self._is_quiet = True
        self._go_on()

    async def pieces(self, patience: float = math.inf) -> AsyncIterator[tuple[int, Piece] | None]:
        """What comes, with the number of the answer that it belongs to; each ends with a piece that has a `finish`.

        Args:
            patience: When nothing came for so many seconds, None is given.
        """
        loop = asyncio.get_running_loop()
        latest, left = loop.time(), len(self.all)
        timer = None if patience == math.inf else loop.call_later(patience, self._ring)  # one, not one for each piece
        try:
            while left:
                if not (self._some or self._is_quiet):
                    self._waiter = loop.create_future()
                    await self._waiter
                some, self._some = self._some, []
                for number in some:
                    piece = self.all[number].read()
                    if piece is not None:
                        left -= bool(piece.finish)
                        latest = loop.time()
                        yield number, piece
                if self._is_quiet:
                    self._is_quiet = False
                    if loop.time() - latest >= patience:
                        yield None
                        latest = loop.time()
                    timer = loop.call_at(latest + patience, self._ring)
        finally:
            if timer is not None:
                timer.cancel()
