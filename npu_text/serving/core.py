"""Texts for an event loop: what is asked for goes to the thread with the engine, what comes back is handed out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from npu_text.batching.driver import Driver
from npu_text.batching.engine import BatchEngine
from npu_text.batching.text_guesser import guessing
from npu_text.batching.texts import Event, Limits, Text, TextRequest, Turn
from npu_text.serving.answers import Answer, Answers
from npu_text.serving.events import EventPace
from npu_text.serving.vocabulary import Vocabulary

__all__ = ["Core", "Listener", "TextJob"]


@dataclass(frozen=True)
class TextJob:
    """A text that somebody asks for.

    Attributes:
        request: What the scheduler is told.
        stop: Strings that end it and are not part of it.
        places: As `Answer` has it.
        stream: Whether it is read as it comes, or when it is whole.
    """

    request: TextRequest
    stop: tuple[str, ...] = ()
    places: bool = False
    stream: bool = True


class Listener:
    """Is told what happens; does nothing with it. Seconds are those of a clock."""

    def first_token(self, seconds: float) -> None:
        """A text got its first token so long after it was asked for."""

    def more_tokens(self, seconds: float, count: int) -> None:
        """Behind other tokens of their texts, so many more came, each after so long."""

    def ended(self, finish: str, prompt: int, shared: int, added: int) -> None:
        """A text ended: why, tokens of its prompt, those that others had computed, tokens added."""

    def turn(self, seconds: float, filled: int, lanes: int) -> None:
        """The device took so long for so many tokens of prompts and a step of so many lanes. Told in another thread."""


@dataclass(slots=True)
class _Entry:
    answer: Answer
    answers: Answers
    number: int
    is_eager: bool
    asked: float = field(default_factory=time.perf_counter)
    last: float = 0.0
    is_told: bool = True  # of all news, if there are any, so that its reader will come


class Core:
    """Continues texts on an engine.

    Attributes:
        engine: Which.
        vocabulary: Its tokens.
        driver: The thread that runs it.
        guesser: Makes what guesses how a text goes on; None where the engine checks no guesses.
    """

    def __init__(
        self,
        engine: BatchEngine,
        vocabulary: Vocabulary,
        limits: Limits | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Nothing runs before `start`."""
        self.engine, self.vocabulary = engine, vocabulary
        self._listener = listener or Listener()
        self.guesser, self._learn = guessing(engine)
        self.driver = Driver(engine, self._deliver, limits, self._observe)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._entries: dict[Text, _Entry] = {}  # who was told longest ago comes first
        self._pace = EventPace()  # of streams that have news

    @property
    def open(self) -> int:
        """Texts that somebody waits for."""
        return len(self._entries)

    def start(self) -> None:
        """Starts the engine's thread; to be called in the event loop that all else happens in."""
        self._loop = asyncio.get_running_loop()
        self.driver.start()

    async def stop(self, patience: float = 0.0) -> None:
        """Waits so many seconds for texts to end, ends those that are left, then the thread."""
        until = time.monotonic() + patience
        while self._entries and time.monotonic() < until:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.driver.stop)
        await asyncio.sleep(0)  # what was delivered last

    @asynccontextmanager
    async def answering(self, jobs: Sequence[TextJob]) -> AsyncIterator[Answers]:
        """Texts that are asked for together; those that have not ended when nobody reads them any more are cancelled.

        Raises:
            InputError: One of them can never run.
            BusyError: Too many wait.
            DeviceError: The device failed before.
        """
        texts = self.driver.submit(*(job.request for job in jobs))
        answers = Answers(
            [Answer(text, self.vocabulary, job.stop, job.places) for text, job in zip(texts, jobs, strict=True)]
        )
        for number, (text, job) in enumerate(zip(texts, jobs, strict=True)):
            self._entries[text] = _Entry(answers.all[number], answers, number, job.stream or bool(job.stop))
        try:
            yield answers
        finally:
            for answer in answers.all:
                if self._entries.pop(answer.text, None):
                    self.driver.cancel(answer.text)
                    text = answer.text
                    self._listener.ended(
                        "stop" if answer.finished else "cancelled", len(text.request.prompt), text.shared, answer.tokens
                    )

    def _deliver(self, events: Sequence[Event]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        more: dict[float, int] = {}  # tokens by how long they took: as long in all texts that were in the same steps
        for event in events:
            entry = self._entries.get(event.text)
            if entry is None:
                continue
            is_first = not entry.last
            if event.chosen:
                count = len(event.chosen)
                if not is_first:
                    seconds = (now - entry.last) / count
                    more[seconds] = more.get(seconds, 0) + count
                else:
                    self._listener.first_token(now - entry.asked)
                entry.last = now
            if entry.answer.push(event):
                entry.is_told = False
            if event.finish or (entry.is_eager and is_first):
                self._tell(event.text)
            if event.finish:
                del self._entries[event.text]
                text = event.text
                self._listener.ended(event.finish, len(text.request.prompt), text.shared, text.added)
        for seconds, count in more.items():
            self._listener.more_tokens(seconds, count)
        waiting = (text for text, entry in self._entries.items() if entry.is_eager and not entry.is_told)
        for text in self._pace.due(waiting, len(self._entries), now):
            self._tell(text)

    def _tell(self, text: Text) -> None:
        entry = self._entries[text] = self._entries.pop(text)
        if not entry.is_told:
            entry.answers.wake(entry.number)
            entry.is_told = True

    def _observe(self, turn: Turn, seconds: float) -> None:
        self._learn(turn, seconds)
        self._listener.turn(
            seconds, sum(len(part.tokens) for fill in turn.fills for part in fill.parts), len(turn.running)
        )
