"""A thread that keeps an engine busy: turn after turn of a scheduler."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from npu_compiler.errors import DeviceError, NPUError
from npu_text.batching.engine import BatchEngine, Chosen, Filling, Stepped
from npu_text.batching.scheduler import Scheduler
from npu_text.batching.texts import Event, Fill, Limits, News, Text, TextRequest, Turn

__all__ = ["Driver", "Status"]


class Status(NamedTuple):
    """How a driver stands.

    Attributes:
        waiting: Texts that have not started.
        lanes: For each lane the number of the text that has it, its tokens and the most it may have; None for none.
        pages: How many there are.
        used_pages: Those that texts have.
        kept_pages: Those that no text has, with what texts may share.
        failure: Why nothing runs any more; empty while it does.
    """

    waiting: int
    lanes: tuple[tuple[int, int, int] | None, ...]
    pages: int
    used_pages: int
    kept_pages: int
    failure: str


class _Asked(NamedTuple):
    """A turn that was handed to the device, what waits for its step, and when that was."""

    turn: Turn
    step: Callable[[], Stepped] | None
    started: float


class Driver:
    """Runs texts on an engine, from a thread of its own.

    Attributes:
        engine: Which; only the thread calls it.
        scheduler: Gives out its lanes and pages.
    """

    def __init__(
        self,
        engine: BatchEngine,
        deliver: Callable[[Sequence[Event]], None],
        limits: Limits | None = None,
        observe: Callable[[Turn, float], None] = lambda turn, seconds: None,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            engine: What computes.
            deliver: Gets the news of a turn, in the thread, when a later turn has been handed to the device: others
                that have work from then on do not hold up the next launch.
            limits: Of the scheduler.
            observe: Is told each turn and how many seconds it took, in the thread.
        """
        self.engine, self.scheduler = engine, Scheduler(engine, limits)
        self._deliver, self._observe = deliver, observe
        self._lock = threading.Condition()
        self._stopping = False
        self._failure = ""
        self._filling: deque[tuple[Fill, Filling]] = deque()  # what may be under way, in the order of the launches
        self._news = News()  # not told yet
        self._absorbed = 0.0  # when the last turn was
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, *requests: TextRequest) -> list[Text]:
        """Texts that wait from now on: all of them, or none.

        Raises:
            InputError: One of them can never run.
            BusyError: Too many texts wait.
            DeviceError: The device failed before.
        """
        for request in requests:
            self.scheduler.check(request)  # takes longer than the thread should wait
        with self._lock:
            if self._failure:
                raise DeviceError(f"nothing runs any more: {self._failure}; start again")
            texts = self.scheduler.submit_checked(requests, time.monotonic())
            self._lock.notify()
        return texts

    def cancel(self, text: Text) -> None:
        """Ends a text; its lane is free when what runs for it is over. Nothing where it has ended already."""
        with self._lock:
            self.scheduler.cancel(text)

    def stop(self) -> None:
        """Ends all texts, and the thread when its turn is over."""
        with self._lock:
            self._stopping = True
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join()

    def status(self) -> Status:
        """How it stands."""
        with self._lock:
            scheduler, pool = self.scheduler, self.scheduler.pool
            lanes = tuple(None if text is None else _place(text) for text in scheduler.lanes)
            return Status(scheduler.waiting, lanes, pool.count, pool.used, pool.kept, self._failure)

    def _run(self) -> None:
        try:
            self._turns()
        except BaseException as error:
            self._failure = str(error) if isinstance(error, NPUError) else repr(error)
            if not isinstance(error, DeviceError):
                raise  # a defect: the thread shows it
        finally:
            with self._lock:
                ended = self.scheduler.end_all()
            finish = "failed" if self._failure else "cancelled"
            self._tell([Event(text, finish=finish) for text in ended])

    def _turns(self) -> None:
        before: _Asked | None = None  # whose step may be under way
        while True:
            if before is not None and not self.scheduler.is_ahead:
                self._tell()
                self._absorb(before, waits=before.step is None)
                before = None
            with self._lock:
                turn = self._next(patient=not (before or self._news or self._filling))
            if turn is None:
                if before is not None and before.step is not None:
                    before.step()
                for _, filling in self._filling:
                    filling()
                return
            asked = _Asked(turn, self._launch(turn), time.perf_counter())
            self._tell([Event(text, finish="late") for text in turn.late])
            if before is not None:
                self._absorb(before, waits=before.step is None and asked.step is None)
            elif not turn:
                self._absorb(asked, waits=True)
            before = asked if turn else None

    def _absorb(self, asked: _Asked, waits: bool) -> None:
        """Waits for a turn's step, or if told to for the first of the prompts under way; the news are told later."""
        stepped = None if asked.step is None else asked.step()
        filled = self._filled(waits)
        with self._lock:
            self._news = self.scheduler.absorb(asked.turn, filled, stepped)
        started, self._absorbed = max(asked.started, self._absorbed), time.perf_counter()
        if asked.turn:
            self._observe(asked.turn, self._absorbed - started)

    def _tell(self, more: Sequence[Event] = ()) -> None:
        """Delivers the news, and more."""
        news, self._news = self._news, News()
        if news or more:
            self._deliver([*news.events(), *more])

    def _next(self, patient: bool) -> Turn | None:
        """The next turn; waits for one where nobody waits for news. None when it is time to stop."""
        while not self._stopping:
            turn = self.scheduler.next_turn(time.monotonic())
            if turn or turn.late or not patient:
                return turn
            self._lock.wait()
        return None

    def _launch(self, turn: Turn) -> Callable[[], Stepped] | None:
        """Hands a turn to the device; gives what waits for its step."""
        for begin in turn.begins:
            self.engine.begin(*begin)
        for fill in turn.fills:
            for source, target in fill.copies:
                self.engine.copy_page(source, target)
            self._filling.append((fill, self.engine.prefill(*fill.parts)))
        return None if turn.steps is None else self.engine.step(turn.steps)

    def _filled(self, waits: bool) -> list[tuple[Fill, tuple[Chosen, ...]]]:
        """What has run of the prompts under way, in order; waits for the first one if nothing else was waited for."""
        done: list[tuple[Fill, tuple[Chosen, ...]]] = []
        while self._filling and ((waits and not done) or self._filling[0][1].is_done()):
            fill, filling = self._filling.popleft()
            done.append((fill, filling()))
        return done


def _place(text: Text) -> tuple[int, int, int]:
    return text.serial, len(text.tokens), len(text.request.prompt) + text.request.limit
