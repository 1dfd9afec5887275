"""Who gets lanes and pages when: texts wait, are filled into the cache by chunks, and run together.

One turn is what a device is asked to do between two looks at the queue: prompts of at most one chunk together, then one
step of all texts that run. So no running text ever waits for more than one chunk of somebody's prompt. A device may do
both at once: then steps go on while prompts are under way, and the chunk that follows is asked for ahead, so that
prompts go in without a gap. Prompts that wait together go in together, where the device has a function for so many;
one that is alone waits for company until what is under way has ended.
The last token of a prompt is no part of a chunk: the first step of its text takes it, and chooses what follows.

Texts start in the order of their priority, then of their arrival, and none overtakes one that waits for pages. One that
has started has every page promised that it may need (`pages`), and is never put out.

Nothing here knows a device or a clock: what a device computed, and the time, are handed in.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import TypeVar

import numpy as np

from npu_compiler.errors import BusyError, InputError
from npu_text.batching.engine import BatchEngine, Chosen, LaneSteps, Prefill, Stepped
from npu_text.batching.pages import PagePool, PageTable
from npu_text.batching.running import RunningTexts
from npu_text.batching.texts import Counters, Event, Fill, Limits, News, Text, TextRequest, Turn

__all__ = ["Scheduler"]

_FEW = 64  # texts that ended, in a heap
_CHUNKS_UNDER_WAY = 2  # the one that is being computed, and the one that follows without a gap


class Scheduler:
    """Gives out the lanes and pages of an engine.

    One turn after the other: `next_turn`, whatever the device makes of it, `absorb`; `submit` and `cancel` at any time
    between, from one thread. Where it `is_ahead`, a turn may be asked for before the one before is absorbed. A text
    that ends in that one, and nobody knew it, has a step too many then, of which nothing is kept.

    Attributes:
        pool: The pages.
        counters: What happened so far.
    """

    def __init__(self, engine: BatchEngine, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.pool = PagePool(engine.pages, engine.page_tokens)
        self.counters = Counters()
        self._engine, self._limits = engine, limits
        fitting = [n for n in engine.chunks if limits.chunk is None or n <= limits.chunk]
        self._chunks = fitting or [engine.chunks[0]]
        self._packs = {
            n: [1, *(k for k in engine.packs.get(n, ()) if limits.chunk is None or k * n <= limits.chunk)]
            for n in self._chunks
        }
        self._longest = max(n * packs[-1] for n, packs in self._packs.items())
        self._lanes = list(range(engine.lanes - 1, -1, -1))
        self._waiting: list[tuple[int, int, Text]] = []  # a heap; texts that ended are still in it
        self._deadlines: list[tuple[float, int, Text]] = []  # the same
        self._waiting_count = 0
        self._filling: list[Text] = []  # those among them that have ended leave with their last part under way
        self._under_way: list[Fill] = []
        self._running = RunningTexts(engine.page_tokens, engine.guess)
        self._asked: deque[Turn] = deque()  # with steps that nobody has absorbed
        self._some_ended = False  # of those that run
        self._leaving: list[Text] = []  # those among them that have a step under way
        self._serials = count()

    @property
    def waiting(self) -> int:
        """Texts that have not started."""
        return self._waiting_count

    @property
    def lanes(self) -> list[Text | None]:
        """Who has which lane."""
        taken = {text.lane: text for text in (*self._filling, *self._stepping())}
        return [taken.get(lane) for lane in range(self._engine.lanes)]

    @property
    def started(self) -> int:
        """Texts that have lanes."""
        return self._engine.lanes - len(self._lanes)

    def submit(self, request: TextRequest, now: float) -> Text:
        """A text that waits from now on.

        Raises:
            InputError: It can never run: no tokens, too many, or such as do not exist.
            BusyError: Too many texts wait.
        """
        self.check(request)
        return self.submit_checked([request], now)[0]

    def submit_checked(self, requests: Sequence[TextRequest], now: float) -> list[Text]:
        """As `submit`, for texts that `check` let through: all of them, or none.

        Raises:
            BusyError: Too many texts wait.
        """
        if self._waiting_count + len(requests) > self._limits.waiting:
            given = f"given {len(requests)} more, where {self._waiting_count} texts wait"
            raise BusyError(f"{given} and at most {self._limits.waiting} may; try again later")
        texts = [Text(request, list(request.prompt), now, next(self._serials)) for request in requests]
        for text in texts:
            request = text.request
            heapq.heappush(self._waiting, (request.priority, text.serial, text))
            if request.patience < math.inf:
                heapq.heappush(self._deadlines, (now + request.patience, text.serial, text))
        self._waiting_count += len(texts)
        return texts

    def check(self, request: TextRequest) -> None:
        """As `submit` does.

        Raises:
            InputError: It can never run.
        """
        engine, prompt = self._engine, request.prompt
        if not prompt or request.limit < 0:
            raise InputError(f"given {len(prompt)} tokens and up to {request.limit} to add, expected at least 1 and 0")
        if len(prompt) + request.limit > engine.context:
            raise InputError(
                f"given a prompt of {len(prompt)} tokens and up to {request.limit} to add, expected at most "
                f"{engine.context} in all, which the model's cache holds for one text"
            )
        if not 0 <= min(prompt) <= max(prompt) < engine.vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < engine.vocabulary)
            raise InputError(f"given the token {wrong}, expected 0 to {engine.vocabulary - 1}")
        engine.check(request.sampling, request.scored, request.grammar is not None)
        if self.pool.pages_of(_most(request)) > self.pool.count:
            raise InputError(
                f"given a text of up to {_most(request)} tokens, which takes {self.pool.pages_of(_most(request))} "
                f"pages; there are {self.pool.count}"
            )

    def cancel(self, text: Text) -> None:
        """Ends a text; nothing where it has ended already.

        Its lane and pages are free at once, or when what is under way of it has run.
        """
        self._end(text, "cancelled")

    def end_all(self) -> list[Text]:
        """Ends all texts, as when the device failed and nothing is under way any more; gives them."""
        texts = [text for _, _, text in self._waiting] + self._filling
        texts += self._stepping()
        texts = [text for text in texts if not text.finish]
        for text in texts:
            self.cancel(text)
        for text in (*self._filling, *self._leaving):
            self._leave(text)
        self._filling, self._leaving, self._under_way = [], [], []
        self._asked.clear()
        self.pool.forget()
        return texts

    def next_turn(self, now: float) -> Turn:
        """What the device is to do next; it may be nothing."""
        turn = Turn(late=self._give_up(now))
        if self._some_ended:
            self._running.drop_ended()
            self._some_ended = False
        if self._running.texts:  # before what is admitted now
            self._ask(turn)
        self._admit(turn)
        self._fill(turn)
        turn.alone = not self._under_way
        return turn

    def _fill(self, turn: Turn) -> None:
        """As much of prompts as there is room for beside what is under way; of each text one part."""
        room = self._longest
        together = Fill((), (), (), 0)  # what may still get company
        due = [text for text in self._filling if not text.finish and text.filled < _filled_ahead(text.request)]
        if len(due) == 1 and self._expects_company(due[0]):
            return
        for text in due:
            length = self._function(text)
            if length > room or not self._follows(together.tokens + length):
                break
            copies = self._begin(text) if text.filled == 0 else []
            length = self._function(text)
            room -= length
            if copies or length != together.length or text.request.scored is not None:
                self._launch(turn, together)  # which may write to a page that is copied
                together = Fill((), copies, (), length)
            together = together._replace(texts=(*together.texts, text), parts=(*together.parts, self._part(text)))
            text.parts += 1
            if text.request.scored is not None:  # no other function does that
                self._launch(turn, together)
                together = Fill((), (), (), 0)
        self._launch(turn, together)

    def _expects_company(self, text: Text) -> bool:
        """Whether a prompt that nobody waits with, and that gains nothing by being next in the queue of the device, may
        still go in together with another one."""
        alone = text.filled > 0 or text.request.scored is not None or len(self._packs[self._function(text)]) == 1
        return bool(self._under_way) and not alone

    def _follows(self, tokens: int) -> bool:
        """Whether so many tokens of prompts may be asked for beside what is under way."""
        under_way = sum(fill.tokens for fill in self._under_way)
        return len(self._under_way) < _CHUNKS_UNDER_WAY or under_way + tokens <= _CHUNKS_UNDER_WAY * self._chunks[-1]

    def _launch(self, turn: Turn, fill: Fill) -> None:
        """Asks for parts of one length, as many at once as there is a function for."""
        while fill.texts:
            count = max(k for k in self._packs[fill.length] if k <= len(fill.texts))
            turn.fills.append(fill._replace(texts=fill.texts[:count], parts=fill.parts[:count]))
            self._under_way.append(turn.fills[-1])
            fill = Fill(fill.texts[count:], (), fill.parts[count:], fill.length)

    @property
    def is_ahead(self) -> bool:
        """Whether what runs needs nothing of the last turn to be asked for again."""
        return self._running.unseen

    def absorb(self, turn: Turn, filled: Sequence[tuple[Fill, tuple[Chosen, ...]]], stepped: Stepped | None) -> News:
        """What came of a turn. Texts that were cancelled meanwhile are left out.

        Args:
            turn: What was asked for.
            filled: What has run by now of this turn's fills and of those of turns before, in the order in which they
                were asked for, each with what the engine gave.
            stepped: What it gave for the steps.
        """
        news = News() if stepped is None else self._after_step(turn, stepped)
        events: list[Event] = []
        joined: list[Text] = []
        for fill, scores in filled:
            self._under_way.remove(fill)
            if fill.copies:
                _table(fill.texts[0]).copied()
            for text, part in zip(fill.texts, fill.parts, strict=True):
                text.parts -= 1
                if not text.finish:
                    events.append(self._after_part(text, part, scores))
                    if text not in self._filling and not text.finish:
                        joined.append(text)
                elif not text.parts:
                    self._filling.remove(text)
                    self._leave(text)
        if joined:
            self._running.add(joined)
        return news._replace(filled=[event for event in events if event.finish or event.scores])

    def _give_up(self, now: float) -> list[Text]:
        late = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].finish):
            _, _, text = heapq.heappop(self._deadlines)
            if text.lane is None and not text.finish:
                self._end(text, "late")
                late.append(text)
        return late

    def _admit(self, turn: Turn) -> None:
        while self._lanes and self._waiting:
            text = self._waiting[0][2]
            if not text.finish:
                request = text.request
                begins = request.prompt[: _filled_ahead(request)]
                table = self.pool.admit(begins, _most(request), self._limits.share and request.scored is None)
                if table is None:
                    return
                text.table, text.lane = table, self._lanes.pop()
                self._filling.append(text)
                self._waiting_count -= 1
                turn.begins.append((text.lane, request.sampling, request.prompt))
            heapq.heappop(self._waiting)

    def _function(self, text: Text) -> int:
        """How many tokens the function takes that takes the next part of a prompt; scored parts are the shortest."""
        left = _filled_ahead(text.request) - text.filled
        chunks = self._chunks if text.request.scored is None else self._chunks[:1]  # they take longer than others
        return next((chunk for chunk in chunks if chunk >= left), chunks[-1])

    def _begin(self, text: Text) -> list[tuple[int, int]]:
        """Takes what others computed; gives the pages to copy."""
        table = _table(text)
        copies = table.begin(text.request.prompt[: _filled_ahead(text.request)])
        text.filled = text.shared = table.shared_tokens
        self.counters.prompt_tokens += len(text.request.prompt)
        self.counters.shared_tokens += text.shared
        return copies

    def _part(self, text: Text) -> Prefill:
        """The next part of a prompt."""
        table, request, start = _table(text), text.request, text.filled
        end = min(start + self._function(text), _filled_ahead(request))
        table.room(end)
        text.filled = end
        table.fill(text.tokens[:end])
        following = None if end == len(request.prompt) else request.prompt[end]
        return Prefill(_lane(text), request.prompt[start:end], start, table.pages, request.scored, following)

    def _ask(self, turn: Turn) -> None:
        running = self._running
        turn.steps, turn.running = self._steps(), running.texts
        turn.full = np.flatnonzero(running.positions >= running.last).tolist()
        running.asked()
        self._asked.append(turn)

    def _is_asked(self, text: Text) -> bool:
        return any(text in turn.running for turn in self._asked)

    def _stepping(self) -> list[Text]:
        """Texts that run, those included that nothing will be asked for any more."""
        asked = (text for turn in self._asked for text in turn.running)
        return list(dict.fromkeys((*asked, *self._running.texts)))

    def _steps(self) -> LaneSteps:
        running = self._running
        running.make_room()
        guesses = self._guesses() if self._engine.guess > 1 else ()
        masks = [(grammar, place) for place in running.guided if (grammar := running.texts[place].request.grammar)]
        sources = running.sources if (running.sources >= 0).any() else None
        return LaneSteps(running.lanes, running.tokens, running.positions, running.pages, guesses, masks, sources)

    def _guesses(self) -> Sequence[Sequence[int]]:
        """How each text may go on, with room for it; nothing where nobody guesses."""
        running, guesses = self._running, []
        for text, position, last in zip(running.texts, running.positions.tolist(), running.last.tolist(), strict=True):
            guess: Sequence[int] = ()
            request, most = text.request, min(self._engine.guess - 1, last - position)
            if most > 0 and request.grammar is None and request.guesser is not None:
                guess = request.guesser.guess(text.tokens, most)[:most]
                _table(text).room(position + 1 + len(guess))
            guesses.append(guess)
        if not any(guesses):
            return ()
        running.look_at_pages()
        return guesses

    def _after_part(self, text: Text, part: Prefill, scores: tuple[Chosen | None, ...]) -> Event:
        if part.scored is not None and part.position == 0:
            scores = (None, *scores)
        if part.position + len(part.tokens) == _filled_ahead(text.request):
            if text.request.limit == 0:
                self._end(text, "length")
            else:
                self._filling.remove(text)
        return Event(text, finish=text.finish, scores=scores)

    def _after_step(self, turn: Turn, stepped: Stepped) -> News:
        texts, tokens = turn.running, stepped.tokens
        finishes = dict.fromkeys(turn.full, "length")
        counts: dict[int, int] = {}
        for place, (text, token) in enumerate(zip(texts, tokens.tolist(), strict=True)):
            if text.finish:  # it was cancelled
                counts[place] = 0
                continue
            text.tokens.append(token)
            if token in text.request.stop:
                finishes[place] = "stop"
        for _, place in turn.steps.masks if turn.steps else ():
            if place not in counts and (finish := _followed(texts[place])) and finishes.get(place) != "stop":
                finishes[place] = finish
        more = self._add_guessed(turn, stepped, finishes, counts)
        if more:
            tokens = np.array([text.tokens[-1] for text in texts])
        self.counters.added_tokens += len(texts) + sum(count - 1 for count in counts.values())
        if turn is self._asked[-1]:
            self._running.know(tokens, dict(more))
        self._asked.remove(turn)
        left = [text for text in self._leaving if not self._is_asked(text)]
        self._leaving = [text for text in self._leaving if text not in left]
        for text in left:
            self._leave(text)
        for place, finish in finishes.items():
            self._end(texts[place], finish)
        return News((), texts, stepped, counts, finishes)

    def _add_guessed(
        self, turn: Turn, stepped: Stepped, finishes: dict[int, str], counts: dict[int, int]
    ) -> list[tuple[int, int]]:
        """Adds the guessed tokens that were right; gives the places of the texts that got some, and how many."""
        for place, guess in enumerate(turn.steps.guesses if turn.steps else ()):
            guesser = turn.running[place].request.guesser
            if guess and guesser is not None and place not in counts:
                right = len(stepped.guessed.get(place, ()))
                guesser.learn(len(guess), right)
                self.counters.guessed += len(guess)
                self.counters.kept += right
        for place, tokens in stepped.guessed.items():
            if place in counts:
                continue
            counts[place] = 1
            for token in tokens:
                if place in finishes:
                    break
                counts[place] += 1
                if finish := self._add(turn.running[place], token):
                    finishes[place] = finish
        return [(place, counts[place] - 1) for place in stepped.guessed if counts[place] > 1]

    def _add(self, text: Text, token: int) -> str:
        """Adds a token to a text; gives why it ends with it, if it does."""
        request = text.request
        text.tokens.append(token)
        finish = _followed(text)
        if token in request.stop:
            return "stop"
        return finish or ("length" if text.added >= request.limit else "")

    def _end(self, text: Text, finish: str) -> None:
        if text.finish:
            return
        text.finish = finish
        self.counters.finished[finish] = self.counters.finished.get(finish, 0) + 1
        if text.lane is None:
            self._waiting_count -= 1
            self._waiting = _without_ended(self._waiting, self._waiting_count)
            self._deadlines = _without_ended(self._deadlines, self._waiting_count)
            return
        if text not in self._filling:
            self._some_ended = True
            if self._is_asked(text):  # which writes to its pages
                self._leaving.append(text)
                return
        elif text.parts:  # which write to its pages
            return
        else:
            self._filling.remove(text)
        self._leave(text)

    def _leave(self, text: Text) -> None:
        """Gives back the lane and the pages of a text that has ended."""
        if text.added:
            text.filled = len(text.tokens) - 1
        _table(text).release(text.tokens[: text.filled])
        self._lanes.append(_lane(text))
        text.lane = text.table = None


def _filled_ahead(request: TextRequest) -> int:
    """Tokens of a prompt that are in the cache before steps begin: the first of these takes the last token, which it
    writes again where there is no other."""
    return max(1, len(request.prompt) - 1)


def _most(request: TextRequest) -> int:
    """Tokens of the text that are ever in the cache: the last one that is chosen is not."""
    return max(len(request.prompt), len(request.prompt) + request.limit - 1)


def _followed(text: Text) -> str:
    """Follows the last token in a text's grammar; gives whether that ends it: ``complete``, or nothing."""
    grammar = text.request.grammar
    if grammar is None:
        return ""
    grammar.take(text.tokens[-1])
    return "complete" if grammar.ended else ""


def _table(text: Text) -> PageTable:
    if text.table is None:
        raise InputError("a text that has no lane was asked for its pages; this is an error of the scheduler")
    return text.table


def _lane(text: Text) -> int:
    if text.lane is None:
        raise InputError("a text that has no lane was asked for it; this is an error of the scheduler")
    return text.lane


_Heap = TypeVar("_Heap", tuple[int, int, Text], tuple[float, int, Text])


def _without_ended(heap: list[_Heap], count: int) -> list[_Heap]:
    """A heap of texts, cleared of those that do not wait any more where they are more than the `count` that do."""
    if len(heap) <= 2 * count + _FEW:
        return heap
    left = [entry for entry in heap if not entry[2].finish and entry[2].lane is None]
    heapq.heapify(left)
    return left
