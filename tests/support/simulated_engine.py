"""A `BatchEngine` without a device: what follows a text is a function of the text, read back from its pages.

Each place of a page holds the token that was written there, and each call reads the whole text through the pages it was
given. So a page that was shared wrongly, lost or overwritten shows at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import DeviceError
from npu_text.batching.engine import Chosen, Filling, LaneSampling, LaneSteps, MaskSource, Prefill, Stepped
from npu_text.batching.scheduler import Scheduler
from npu_text.batching.texts import Event, Fill, Limits, TextRequest, Turn

__all__ = ["SimulatedEngine", "Simulation", "alone", "is_allowed"]

Result = TypeVar("Result")
_LOOKS_BACK = 12  # tokens that what follows depends on, beside their number


class SimulatedEngine:
    """See `BatchEngine`.

    Attributes:
        seconds: What a call takes on the device, however many lanes it has.
        fails: Set to make the next call fail as a device does.
        ending: This token is made likely, so that texts end by themselves.
        script: What every text goes on with, then `ending`; None for what follows from the text.
        late: For so many steps what is filled in stays under way, each behind what was filled in before.
        calls: How many prefills and steps there were.
    """

    def __init__(
        self, lanes: int = 4, pages: int = 64, page_tokens: int = 8, context: int = 128, vocabulary: int = 320
    ) -> None:
        self.lanes, self.pages, self.page_tokens = lanes, pages, page_tokens
        self.context, self.vocabulary = context, vocabulary
        self.chunks: tuple[int, ...] = (8, 32)
        self.packs: Mapping[int, tuple[int, ...]] = {}
        self.guess = 1
        self.seconds, self.fails, self.ending = 0.0, False, -1
        self.script: Sequence[int] | None = None
        self.calls, self.late = [0, 0], 0
        self._queue: list[_Late] = []  # what is filled in, and copied
        self._memory = np.full((pages, page_tokens), -1, np.int64)
        self._texts: dict[int, list[int]] = {}
        self._prompts: dict[int, int] = {}
        self._samplings: dict[int, LaneSampling] = {}
        self._ready = 0.0
        self._thread: int | None = None
        self._last: list[int] = []  # what the last step chose

    def check(self, sampling: LaneSampling, scored: int | None, masked: bool) -> None:
        pass

    def begin(self, lane: int, sampling: LaneSampling, tokens: Sequence[int]) -> None:
        self._check_call(lane)
        self._texts[lane], self._prompts[lane], self._samplings[lane] = list(tokens), len(tokens), sampling

    def prefill(self, *parts: Prefill) -> Filling:
        for part in parts:
            self._check_call(part.lane)
        longest = max(len(part.tokens) for part in parts)
        assert len(parts) in (1, *self.packs.get(next(n for n in self.chunks if n >= longest), ()))
        assert len(parts) == 1 or all(part.scored is None for part in parts)
        self.calls[0] += 1
        late = _Late(self._queue, self.late, lambda: self._filled(parts), [part.lane for part in parts])
        self._queue.append(late)
        late.is_done()
        late.wait = self._later(lambda: None)
        return late

    def _filled(self, parts: Sequence[Prefill]) -> tuple[Chosen, ...]:
        for part in parts:  # all are written before any is read
            end = part.position + len(part.tokens)
            assert part.tokens
            assert list(part.tokens) == self._texts[part.lane][part.position : end], "tokens of another text"
            self._write(part.pages, part.position, part.tokens)
        for part in parts:
            self._check_text(part.lane, part.pages, part.position + len(part.tokens))
        part = parts[0]
        if part.scored is None:
            return ()
        prompt, end = self._texts[part.lane][: self._prompts[part.lane]], part.position + len(part.tokens)
        assert part.following == (prompt[end] if end < len(prompt) else None), "another token than the next one"
        places = range(part.position + 1, min(end + 1, len(prompt)))
        return tuple(_told(self.logits(prompt[:at]), prompt[at], part.scored) for at in places)

    def step(self, steps: LaneSteps) -> Callable[[], Stepped]:
        lanes = steps.lanes.tolist()
        assert lanes
        assert len(set(lanes)) == len(lanes)
        self.calls[1] += 1
        under_way = [lane for late in self._queue for lane in late.lanes]
        assert set(lanes).isdisjoint(under_way), "a step of a lane that is filled in"
        for lane in lanes:
            self._check_call(lane)
        masks = {place: self._mask(source) for source, place in steps.masks}
        return self._later(lambda: self._stepped(steps, masks))

    def _stepped(self, steps: LaneSteps, masks: Mapping[int, NDArray[np.uint32] | None]) -> Stepped:
        """What a step does, as late as possible: what is filled in meanwhile overtakes it."""
        results = []
        for place, (lane, token, position, pages) in enumerate(
            zip(steps.lanes.tolist(), steps.tokens.tolist(), steps.positions.tolist(), steps.pages, strict=True)
        ):
            if steps.sources is not None and steps.sources[place] >= 0:
                token = self._last[steps.sources[place]]
            tokens = [token, *(steps.guesses[place] if steps.guesses else ())]
            assert 1 <= len(tokens) <= self.guess
            assert place not in masks or len(tokens) == 1
            text = self._texts[lane]
            assert position == len(text) - 1, "a place that is not the next one"
            assert token == text[-1], "another token than the one that was chosen"
            self._write(pages, position, tokens)
            chosen: list[Chosen] = []
            for number in range(len(tokens)):
                self._check_text(lane, pages, position + number + 1)
                chosen.append(self._choose(lane, position + number + 1, masks.get(place)))
                if tokens[number + 1 : number + 2] != [chosen[-1].token]:
                    break
            results.append(tuple(chosen))
        for late in self._queue:
            late.left -= 1
        self._last = [chosen[0].token for chosen in results]
        return Stepped(
            np.array([chosen[0].token for chosen in results]),
            {place: [one.token for one in chosen[1:]] for place, chosen in enumerate(results) if len(chosen) > 1},
            {place: chosen for place, chosen in enumerate(results) if chosen[0].logprob is not None},
        )

    def _mask(self, source: MaskSource | None) -> NDArray[np.uint32] | None:
        if source is None:
            return None
        masks = np.zeros((1, (self.vocabulary + 31) // 32), np.uint32)
        source.write_masks([(source, 0)], masks)
        return masks.reshape(-1)

    def copy_page(self, source: int, target: int) -> None:
        assert source != target

        def copy() -> tuple[Chosen, ...]:
            self._memory[target] = self._memory[source]
            return ()

        late = _Late(self._queue, 0, copy)
        self._queue.append(late)
        late.is_done()

    def logits(self, text: Sequence[int]) -> NDArray[np.float32]:
        """What follows a text."""
        random = np.random.default_rng([len(text), *text[-_LOOKS_BACK:]])
        logits = random.standard_normal(self.vocabulary, np.float32) * 2
        if self.ending >= 0 and random.random() < 0.1:
            logits[self.ending] = 20
        return logits

    def _write(self, pages: Sequence[int], position: int, tokens: Sequence[int]) -> None:
        for at, token in enumerate(tokens, position):
            self._memory[pages[at // self.page_tokens], at % self.page_tokens] = token

    def _check_text(self, lane: int, pages: Sequence[int], end: int) -> None:
        held = self._memory[list(pages)].reshape(-1)[:end].tolist()
        assert held == self._texts[lane][:end], f"lane {lane} reads the text of another"

    def _choose(self, lane: int, end: int, mask: NDArray[np.uint32] | None) -> Chosen:
        text, sampling = self._texts[lane][:end], self._samplings[lane]
        plain = self.logits(text)
        logits = plain.astype(np.float64)
        if self.script is not None:
            place = end - self._prompts[lane]
            logits[self.script[place] if place < len(self.script) else self.ending] = 1000
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocabulary].astype(bool)
            assert allowed.any(), "a mask that allows nothing"
            logits[~allowed] = -np.inf
        token = self._drawn(self._penalised(logits, lane, text), sampling, end)
        if end == len(self._texts[lane]):
            self._texts[lane].append(token)
        return _told(plain, token, sampling.best)

    def _penalised(self, logits: NDArray[np.float64], lane: int, text: list[int]) -> NDArray[np.float64]:
        sampling = self._samplings[lane]
        seen = np.unique(text)
        penalty = sampling.repetition_penalty
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        for token in text[self._prompts[lane] :]:
            logits[token] -= sampling.frequency_penalty
        for token in set(text[self._prompts[lane] :]):
            logits[token] -= sampling.presence_penalty
        return logits

    def _drawn(self, logits: NDArray[np.float64], sampling: LaneSampling, end: int) -> int:
        if sampling.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")
        order = order[: sampling.top_k or len(order)]
        weights = np.exp((logits[order] - logits[order[0]]) / sampling.temperature)
        weights /= weights.sum()
        count = int(np.searchsorted(weights.cumsum(), min(sampling.top_p, 1 - 1e-12))) + 1
        weights = weights[:count]
        weights[weights < sampling.min_p * weights[0]] = 0
        at = np.random.default_rng([sampling.seed, end]).random() * weights.sum()
        return int(order[min(int(np.searchsorted(weights.cumsum(), at, "right")), len(weights) - 1)])

    def _check_call(self, lane: int) -> None:
        assert 0 <= lane < self.lanes
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident(), "an engine is one thread's"
        if self.fails:
            raise DeviceError("the device is gone; this was asked for")

    def _later(self, result: Callable[[], Result]) -> Callable[[], Result]:
        self._ready = max(self._ready, time.perf_counter()) + self.seconds

        def wait(until: float = self._ready) -> Result:
            time.sleep(max(0.0, until - time.perf_counter()))
            return result()

        return wait


class _Late:
    """What is done behind what was asked for before it: after some steps, or when somebody waits."""

    def __init__(
        self, queue: list[_Late], left: int, run: Callable[[], tuple[Chosen, ...]], lanes: Sequence[int] = ()
    ) -> None:
        self._queue, self.left, self._run, self.lanes = queue, left, run, lanes
        self._given: list[tuple[Chosen, ...]] = []
        self.wait: Callable[[], None] = lambda: None

    def is_done(self) -> bool:
        while not self._given and self._queue[0].left <= 0:
            self._queue[0]._finish()
        return bool(self._given)

    def __call__(self) -> tuple[Chosen, ...]:
        self.wait()
        while not self._given:
            self._queue[0]._finish()
        return self._given[0]

    def _finish(self) -> None:
        self._queue.pop(0)
        self._given.append(self._run())


def _told(logits: NDArray[np.float32], token: int, best: int | None) -> Chosen:
    if best is None:
        return Chosen(token)
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs = shifted - np.log(np.exp(shifted).sum())
    order = np.argsort(-logprobs, kind="stable")[:best]
    return Chosen(token, float(logprobs[token]), tuple((int(t), float(logprobs[t])) for t in order))


def is_allowed(mask: NDArray[np.uint32], token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


class Simulation:
    """A scheduler and its device, turn by turn; the clock counts turns."""

    def __init__(self, engine: SimulatedEngine, limits: Limits | None = None, ahead: bool = False) -> None:
        self.ahead = ahead  # turns are asked for before the last one is absorbed
        self.before: Callable[[], None] = lambda: None
        self.engine, self.scheduler = engine, Scheduler(engine, limits)
        self.now = 0.0
        self.events: list[Event] = []
        self.filling: list[tuple[Fill, Filling]] = []

    def launch(self) -> tuple[Turn, Callable[[], None]]:
        """One turn; what is called then waits for it, or for the one before."""
        if not self.scheduler.is_ahead:
            self.catch_up()
        turn = self.scheduler.next_turn(self.now)
        self.now += 1
        for begin in turn.begins:
            self.engine.begin(*begin)
        for fill in turn.fills:
            for copy in fill.copies:
                self.engine.copy_page(*copy)
            self.filling.append((fill, self.engine.prefill(*fill.parts)))
        step = None if turn.steps is None else self.engine.step(turn.steps)

        def absorb() -> None:
            stepped = None if step is None else step()
            done = [entry for entry in self.filling if entry[1].is_done()] or self.filling[: step is None]
            self.filling = [entry for entry in self.filling if entry not in done]
            news = self.scheduler.absorb(turn, [(fill, filling()) for fill, filling in done], stepped)
            self.events += news.events()

        def absorb_before() -> None:
            self.catch_up()
            self.before = absorb

        return turn, absorb_before if self.ahead else absorb

    def catch_up(self) -> None:
        before, self.before = self.before, lambda: None
        before()

    def turn(self) -> Turn:
        turn, absorb = self.launch()
        absorb()
        return turn

    def run(self) -> None:
        while self.turn() or self.filling or self.scheduler.started:
            pass

    def check_all_free(self) -> None:
        pool = self.scheduler.pool
        assert (pool.used, pool.promised, self.scheduler.started, self.scheduler.waiting) == (0, 0, 0, 0)
        pool.forget()
        assert sorted(pool._free) == list(range(pool.count))
        assert pool._root.children == {}


def alone(request: TextRequest) -> list[int]:
    """What a text becomes with nobody else there."""
    simulation = Simulation(SimulatedEngine(lanes=1, pages=16), Limits(share=False))
    simulation.engine.ending = 7
    text = simulation.scheduler.submit(request, 0)
    simulation.run()
    return text.tokens
