"""What a server's scheduling costs, on a device that is a model of one; needs no GPU and no time of its own.

`python -m benchmarks.serving_simulation` runs the real scheduler and driver against a clock that is only counted. The
device has two streams, one for steps and one for prompts. What each takes by itself, and at which share of its pace it
gets on while both are busy, were measured on an H200 with Qwen2.5-1.5B. A server's event loop is a third stream: it
stands still while the engine's thread has the interpreter's lock, which that thread waits for where the loop is busy.
`--loop` multiplies what things cost the loop, as processors, and what they take for a call of the system, differ.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from npu_text.batching.driver import Driver
from npu_text.batching.engine import Chosen, LaneSampling, LaneSteps, Prefill, Stepped
from npu_text.batching.texts import Event, Text, TextRequest
from npu_text.serving.events import SECONDS_OF_EVENT, EventPace
from npu_text.serving.server import _SWITCH_SECONDS

__all__ = ["Client", "Costs", "LoopCosts", "main", "simulate"]


@dataclass(frozen=True)
class LoopCosts:
    """Milliseconds of a server's event loop.

    Attributes:
        request: For a request, from its connection to its text.
        passes: So many times a request waits behind what else the loop has to do.
        event: For an event of a stream.
        end: For the end of a stream.
        token: For the news of a token, told or not.
        pace: As `SECONDS_OF_EVENT`.
    """

    request: float = 1.2
    passes: int = 5
    event: float = 0.03
    end: float = 0.25
    token: float = 0.0015
    pace: float = 1000 * SECONDS_OF_EVENT

    def times(self, factor: float) -> LoopCosts:
        """The same on another processor."""
        costs = {name: factor * getattr(self, name) for name in ("request", "event", "end", "token")}
        return replace(self, **costs)


@dataclass(frozen=True)
class Costs:
    """Milliseconds.

    Attributes:
        steps: Of a step, by the lanes of its function.
        chunks: Of a chunk by itself, by the tokens of its function.
        packs: Of such chunks of several prompts, by these tokens and then by the prompts.
        beside: The shares of their own pace that a step and a chunk keep beside each other, by the chunk's prompts.
        ahead: Of the host, from a step's tokens to the next launch.
        fill: Of the host, to hand over a chunk.
        wake: From the end of the device's work to the host's next instruction.
        switch: For which a thread waits at most for the interpreter's lock.
        client: The least and the most from a text's last token to the next request of its client.
        loop: Of a server; None where there is none.
    """

    steps: Mapping[int, float] = field(default_factory=lambda: {1: 0.99, 8: 1.12, 32: 1.5, 64: 1.635})
    chunks: Mapping[int, float] = field(default_factory=lambda: {128: 1.55, 512: 2.57})
    packs: Mapping[int, Mapping[int, float]] = field(default_factory=lambda: {512: {2: 4.15}})
    beside: Mapping[int, tuple[float, float]] = field(default_factory=lambda: {1: (0.52, 0.554), 2: (0.375, 0.641)})
    ahead: float = 0.3
    fill: float = 0.08
    wake: float = 0.015
    switch: float = 1000 * _SWITCH_SECONDS
    client: tuple[float, float] = (0.0, 0.0)
    loop: LoopCosts | None = None


@dataclass
class _Job:
    left: float
    prompts: int = 0
    then: Callable[[], None] = lambda: None

    @property
    def done(self) -> bool:
        return self.left == 0


class _Model:
    """A `BatchEngine` on counted time, and the loop beside it."""

    page_tokens, context, vocabulary, guess = 128, 2048, 1 << 17, 1
    overlaps = True

    def __init__(self, costs: Costs) -> None:
        self.costs, self.lanes, self.chunks = costs, max(costs.steps), tuple(costs.chunks)
        self.packs: Mapping[int, tuple[int, ...]] = {length: tuple(costs.packs[length]) for length in costs.packs}
        self.pages = 16 * self.lanes
        self.now = 0.0
        self.counts: Counter[str] = Counter()  # of chunks by their prompts, steps, and their lanes
        self.busy: Counter[str] = Counter()  # milliseconds in which both streams, or the loop, had something to do
        self.loop: deque[_Job] = deque()
        self._streams: tuple[deque[_Job], deque[_Job]] = (deque(), deque())
        self._has_lock = False
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Calls something at a time."""
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def sleep(self) -> None:
        """Until the next thing that is due."""
        self._advance(math.inf)

    def check(self, sampling: LaneSampling, scored: int | None, masked: bool) -> None: ...

    def begin(self, lane: int, sampling: LaneSampling, tokens: Sequence[int]) -> None: ...

    def copy_page(self, source: int, target: int) -> None: ...

    def prefill(self, *parts: Prefill) -> Any:
        self._compute(self.costs.fill)
        length = next(n for n in self.chunks if n >= max(len(part.tokens) for part in parts))
        cost = self.costs.chunks[length] if len(parts) == 1 else self.costs.packs[length][len(parts)]
        job = _Job(cost, len(parts))
        self._streams[1].append(job)
        self.counts[f"chunks of {len(parts)}"] += 1
        return _Filling(self, job)

    def step(self, steps: LaneSteps) -> Callable[[], Stepped]:
        self._compute(self.costs.ahead)
        lanes = len(steps.lanes)
        self.counts.update({"steps": 1, "lanes": lanes})
        job = _Job(self.costs.steps[min(n for n in self.costs.steps if n >= lanes)])
        self._streams[0].append(job)

        def wait() -> Stepped:
            self.finish(job)
            return Stepped(60 + (steps.lanes + steps.positions) % 20)

        return wait

    def finish(self, job: _Job) -> None:
        """Waits for a job."""
        if job.done:
            return
        while job.left > 0:
            self._advance(math.inf)
        self._until(self.now + self.costs.wake)

    def _compute(self, milliseconds: float) -> None:
        """The engine's thread, once it has the interpreter's lock."""
        until = self.now + self.costs.switch
        while self.loop and self.now < until:
            self._advance(until)
        self._has_lock = True
        self._until(self.now + milliseconds)
        self._has_lock = False

    def _until(self, when: float) -> None:
        while self.now < when:
            self._advance(when)

    def _advance(self, limit: float) -> None:
        """On to the next thing that happens, or to the limit."""
        streams = (*self._streams, self.loop)
        step, chunk, task = heads = [stream[0] if stream else None for stream in streams]
        both = step is not None and chunk is not None
        shares = self.costs.beside[chunk.prompts] if both and chunk is not None else (1.0, 1.0)
        rates = (*shares, 0.0 if self._has_lock else 1.0)
        ends = [self.now + job.left / rate for job, rate in zip(heads, rates, strict=True) if job is not None and rate]
        when = min([limit, *ends, *([self._due[0][0]] if self._due else [])])
        assert when < math.inf
        spent, self.now = when - self.now, when
        self.busy.update({"both": spent * both, "loop": spent * (task is not None and not self._has_lock)})
        for stream, job, rate in zip(streams, heads, rates, strict=True):
            if job is not None:
                job.left -= spent * rate
                if job.left <= 1e-9:
                    job.left = 0.0
                    stream.popleft()
                    job.then()
        while self._due and self._due[0][0] <= self.now:
            heapq.heappop(self._due)[2]()


@dataclass
class _Filling:
    model: _Model
    job: _Job

    def is_done(self) -> bool:
        return self.job.done

    def __call__(self) -> tuple[Chosen, ...]:
        self.model.finish(self.job)
        return ()


class _Lock:
    """In the place of a driver's lock: waiting for work is waiting for what is due."""

    def __init__(self, model: _Model) -> None:
        self._model = model

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify(self) -> None: ...

    def wait(self) -> None:
        self._model.sleep()


@dataclass(frozen=True)
class Client:
    """How texts are asked for.

    Attributes:
        clients: That ask again once they were answered; 0 for requests at random.
        rate: Of those, a second.
        burst: How many ask at once.
        prompt, answer: Tokens of each.
        seconds: For which they ask; the first tenth is not counted.
    """

    clients: int = 0
    rate: float = 0.0
    burst: int = 1
    prompt: int = 512
    answer: int = 256
    seconds: float = 12.0


class _Loop:
    """A server's event loop, which has of the real one what costs it time."""

    def __init__(self, model: _Model, costs: LoopCosts, leave: Callable[[], None]) -> None:
        """Over a model; `leave` is called when a client has the end of its text."""
        self._model, self._costs, self._leave = model, costs, leave
        self._untold: dict[Text, bool] = {}  # who was told longest ago comes first; whether there is anything
        self._pace = EventPace(costs.pace)

    def do(self, milliseconds: float, then: Callable[[], None]) -> None:
        """Something, when all before is done."""
        self._model.loop.append(_Job(milliseconds, then=then))

    def request(self, submit: Callable[[], None]) -> None:
        """Reads a request."""
        passes = self._costs.passes

        def go_on(left: int) -> None:
            if left:
                self.do(self._costs.request / passes, lambda: go_on(left - 1))
            else:
                submit()

        go_on(passes)

    def deliver(self, events: Sequence[Event]) -> None:
        """Takes news from the engine's thread."""
        self.do(self._costs.token * len(events), lambda: self._dispatch(events))

    def _dispatch(self, events: Sequence[Event]) -> None:
        """As `Core` does."""
        for event in events:
            if event.finish:
                self._untold.pop(event.text, None)
                self.do(self._costs.end, self._leave)
            elif event.text in self._untold:
                self._untold[event.text] = True
            else:
                self._tell(event.text)
        waiting = (text for text, has_news in self._untold.items() if has_news)
        for text in self._pace.due(waiting, len(self._untold), self._model.now):
            self._tell(text)

    def _tell(self, text: Text) -> None:
        self._untold.pop(text, None)
        self._untold[text] = False
        self.do(self._costs.event, lambda: None)


def simulate(costs: Costs, client: Client, seed: int = 0) -> dict[str, float]:
    """Tokens a second, what clients waited for, in milliseconds, and what device and loop did."""
    model, numbers, generator = _Model(costs), count(), random.Random(seed)
    driver = Driver(model, lambda events: deliver(events))
    driver._lock = _Lock(model)  # type: ignore[assignment]
    end = 1000 * client.seconds
    asked: dict[Text, float] = {}
    last: dict[Text, float] = {}
    first: list[float] = []
    between: list[float] = []
    tokens = [0]

    def ask() -> None:
        since = model.now

        def submit() -> None:
            (text,) = driver.submit(TextRequest((next(numbers), *range(1, client.prompt)), client.answer))
            asked[text] = since

        submit() if loop is None else loop.request(submit)

    def arrive() -> None:
        for _ in range(client.burst):
            ask()
        model.at(model.now + 1000 * generator.expovariate(client.rate / client.burst), arrive)

    def leave() -> None:
        if client.clients:
            model.at(model.now + generator.uniform(*costs.client), ask)

    def deliver(events: Sequence[Event]) -> None:
        for event in events:
            counted = model.now > end / 10
            if event.chosen:
                tokens[0] += len(event.chosen) * counted
                if event.text in last and counted:
                    between.append(model.now - last[event.text])
                elif counted:
                    first.append(model.now - asked[event.text])
                last[event.text] = model.now
            if event.finish:
                del asked[event.text], last[event.text]
                if loop is None:
                    leave()
        if loop is not None:
            loop.deliver(events)

    def stop() -> None:
        driver._stopping = True

    loop = None if costs.loop is None else _Loop(model, costs.loop, leave)
    for _ in range(client.clients):
        ask()
    if client.rate:
        model.at(0.0, arrive)
    model.at(end, stop)
    driver._turns()
    counts = model.counts
    return {
        "tokens/s": round(tokens[0] / (0.9 * client.seconds)),
        "first p50": round(float(np.percentile(first, 50)), 1),
        "first p99": round(float(np.percentile(first, 99)), 1),
        "between p50": round(float(np.percentile(between, 50)), 2),
        "between p99": round(float(np.percentile(between, 99)), 2),
        "between most": round(max(between), 2),
        "lanes of a step": round(counts["lanes"] / counts["steps"], 1),
        "prompts alone": round(counts["chunks of 1"] / (counts["chunks of 1"] + 2 * counts["chunks of 2"]), 2),
        "both busy": round(model.busy["both"] / end, 2),
        "loop busy": round(model.busy["loop"] / end, 2),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_simulation")
    parser.add_argument("--loop", type=float, nargs="*", default=[1.0, 1.4, 1.8], help="times the loop's costs")
    parser.add_argument("--client", type=float, nargs=2, default=(2.0, 3.5), help="ms from an answer to a new request")
    options = parser.parse_args()
    print(f"{'engine, 64 texts':32}", json.dumps(simulate(Costs(), Client(64))), flush=True)
    for factor in options.loop:
        costs = Costs(client=tuple(options.client), loop=LoopCosts().times(factor))
        for name, client in (
            ("64 clients", Client(64)),
            ("50 a second at random", Client(rate=50, seconds=25)),
            ("50 a second by dozens", Client(rate=50, burst=12, seconds=25)),
            ("one client", Client(1)),
        ):
            print(f"{f'{name}, loop x {factor:g}':32}", json.dumps(simulate(costs, client)), flush=True)


if __name__ == "__main__":
    main()
