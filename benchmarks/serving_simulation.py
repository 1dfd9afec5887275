"""What a server's scheduling costs, on a device that is a model of one; needs no GPU and no time of its own.

`python -m benchmarks.serving_simulation` runs the real scheduler and driver against a clock that is only counted. The
device has two streams, one for steps and one for prompts. What each takes by itself, and a chunk beside one step, were
measured on an H200 with Qwen2.5-1.5B; while both streams are busy each gets on at a share of its pace. `--share` says
what a step keeps, 0.45 as measured, and more on a device that divides itself otherwise.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from npu_text.batching.driver import Driver
from npu_text.batching.engine import Chosen, LaneSampling, LaneSteps, Prefill, Stepped
from npu_text.batching.texts import Event, Text, TextRequest

__all__ = ["Client", "Costs", "main", "simulate"]


@dataclass(frozen=True)
class Costs:
    """Milliseconds.

    Attributes:
        steps: Of a step, by the lanes of its function.
        chunks: Of a chunk by itself, by the tokens of its function.
        packs: Of such chunks of several prompts, by these tokens and then by the prompts.
        together: Of the longest chunk of one prompt and a step of all lanes that begin together.
        share: How much of its own pace a step keeps beside a chunk.
        ahead: Of the host, from a step's tokens to the next launch.
        fill: Of the host, to hand over a chunk.
        wake: From the end of the device's work to the host's next instruction.
        client: From a text's last token to the next request of its client.
    """

    steps: dict[int, float] = field(default_factory=lambda: {1: 0.99, 8: 1.21, 32: 1.60, 64: 1.72})
    chunks: dict[int, float] = field(default_factory=lambda: {128: 1.55, 512: 3.03})
    packs: dict[int, dict[int, float]] = field(default_factory=dict)
    together: float = 4.24
    share: float = 0.45
    ahead: float = 0.035
    fill: float = 0.05
    wake: float = 0.015
    client: float = 0.0

    @property
    def chunk_share(self) -> float:
        """How much of its own pace a chunk keeps beside steps: so that both take `together`."""
        step, chunk = self.steps[max(self.steps)], self.chunks[max(self.chunks)]
        return 1 - self.share * (self.together - chunk) / step


@dataclass
class _Job:
    left: float

    @property
    def done(self) -> bool:
        return self.left == 0


class _Model:
    """A `BatchEngine` on counted time."""

    page_tokens, context, vocabulary, guess = 128, 2048, 1 << 17, 1
    overlaps = True

    def __init__(self, costs: Costs) -> None:
        self.costs, self.lanes, self.chunks = costs, max(costs.steps), tuple(costs.chunks)
        self.packs: Mapping[int, tuple[int, ...]] = {length: tuple(costs.packs[length]) for length in costs.packs}
        self.pages = 16 * self.lanes
        self.now = 0.0
        self.counts = [0, 0, 0.0]  # steps, lanes of steps, milliseconds in which both streams were busy
        self._streams: tuple[deque[_Job], deque[_Job]] = (deque(), deque())
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
        self._until(self.now + self.costs.fill)
        length = next(n for n in self.chunks if n >= max(len(part.tokens) for part in parts))
        cost = self.costs.chunks[length] if len(parts) == 1 else self.costs.packs[length][len(parts)]
        job = _Job(cost)
        self._streams[1].append(job)
        return _Filling(self, job)

    def step(self, steps: LaneSteps) -> Callable[[], Stepped]:
        self._until(self.now + self.costs.ahead)
        lanes = len(steps.lanes)
        self.counts[0] += 1
        self.counts[1] += lanes
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

    def _until(self, when: float) -> None:
        while self.now < when:
            self._advance(when)

    def _advance(self, limit: float) -> None:
        """On to the next thing that happens, or to the limit."""
        heads = [stream[0] if stream else None for stream in self._streams]
        step, chunk = heads
        both = step is not None and chunk is not None
        rates = (self.costs.share, self.costs.chunk_share) if both else (1.0, 1.0)
        ends = [self.now + job.left / rate for job, rate in zip(heads, rates, strict=True) if job is not None]
        when = min([limit, *ends, *([self._due[0][0]] if self._due else [])])
        assert when < math.inf
        spent, self.now = when - self.now, when
        self.counts[2] += spent * both
        for stream, job, rate in zip(self._streams, heads, rates, strict=True):
            if job is not None:
                job.left -= spent * rate
                if job.left <= 1e-9:
                    job.left = 0.0
                    stream.popleft()
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


def simulate(costs: Costs, client: Client, seed: int = 0) -> dict[str, float]:
    """Tokens a second, and what clients waited for, in milliseconds."""
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
        prompt = (next(numbers), *range(1, client.prompt))
        (text,) = driver.submit(TextRequest(prompt, client.answer))
        asked[text] = model.now

    def arrive() -> None:
        for _ in range(client.burst):
            ask()
        model.at(model.now + 1000 * generator.expovariate(client.rate / client.burst), arrive)

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
                if client.clients:
                    model.at(model.now + costs.client, ask)

    def stop() -> None:
        driver._stopping = True

    for _ in range(client.clients):
        ask()
    if client.rate:
        model.at(0.0, arrive)
    model.at(end, stop)
    driver._turns()
    return {
        "tokens/s": round(tokens[0] / (0.9 * client.seconds)),
        "first p50": round(float(np.percentile(first, 50)), 1),
        "first p99": round(float(np.percentile(first, 99)), 1),
        "between p50": round(float(np.percentile(between, 50)), 2),
        "between p99": round(float(np.percentile(between, 99)), 2),
        "between most": round(max(between), 2),
        "lanes of a step": round(model.counts[1] / model.counts[0], 1),
        "both busy": round(model.counts[2] / end, 2),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_simulation")
    parser.add_argument("--share", type=float, nargs="*", default=[0.45, 0.6, 0.75], help="of a step beside a chunk")
    parser.add_argument("--client", type=float, default=3.0, help="ms from an answer to the client's next request")
    options = parser.parse_args()
    for share in options.share:
        costs = Costs(share=share)
        print("share", share, round(costs.chunk_share, 3))
        for name, each, client in (
            ("engine, 64 texts", costs, Client(64)),
            ("64 clients", Costs(share=share, client=options.client), Client(64)),
            ("50 a second at random", costs, Client(rate=50, seconds=25)),
            ("50 a second by dozens", costs, Client(rate=50, burst=12, seconds=25)),
            ("50 a second by 32", costs, Client(rate=50, burst=32, seconds=25)),
            ("one text", costs, Client(1)),
        ):
            print(f"{name:24}", json.dumps(simulate(each, client)), flush=True)


if __name__ == "__main__":
    main()
