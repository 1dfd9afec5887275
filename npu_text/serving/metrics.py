"""Figures of a server for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from npu_text.batching.driver import Driver
from npu_text.serving.core import Listener

__all__ = ["Metrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class _Seconds(Collector):
    """A histogram of seconds, to which many equal ones can be added at once, unlike that of the package."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0
        registry.register(self)

    def add(self, seconds: float, count: int = 1) -> None:
        """So many times so many seconds."""
        self._counts[bisect_left(_SECONDS, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        reached = list(accumulate(self._counts))
        bounds = [*map(str, map(float, _SECONDS)), "+Inf"]
        buckets = list(zip(bounds, reached, strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


class Metrics(Listener, Collector):
    """Counts what a core tells, and asks its driver how it stands."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._driver: Driver | None = None
        self._first = self._seconds("first_token_seconds", "From a request to its first token")
        self._next = self._seconds("next_token_seconds", "From a token to the next")
        self._turn = self._seconds("turn_seconds", "A turn of the device")
        self._ended = Counter("npu_texts", "Texts that ended, by why", ["finish"], registry=self.registry)
        self._prompt = self._count("prompt_tokens", "Tokens of prompts")
        self._shared = self._count("shared_prompt_tokens", "Tokens of prompts that were in the cache already")
        self._added = self._count("added_tokens", "Tokens that were chosen")
        self.registry.register(self)

    def _seconds(self, name: str, documentation: str) -> _Seconds:
        return _Seconds(f"npu_{name}", documentation, self.registry)

    def _count(self, name: str, documentation: str) -> Counter:
        return Counter(f"npu_{name}", documentation, registry=self.registry)

    def watch(self, driver: Driver) -> None:
        """Tells how a driver stands, too."""
        self._driver = driver

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def first_token(self, seconds: float) -> None:
        self._first.add(seconds)

    def more_tokens(self, seconds: float, count: int) -> None:
        self._next.add(seconds, count)

    def ended(self, finish: str, prompt: int, shared: int, added: int) -> None:
        self._ended.labels(finish).inc()
        self._prompt.inc(prompt)
        self._shared.inc(shared)
        self._added.inc(added)

    def turn(self, seconds: float, filled: int, lanes: int) -> None:
        self._turn.add(seconds)

    def collect(self) -> Iterator[Metric]:
        """How the driver stands; for the registry."""
        if self._driver is None:
            return
        status = self._driver.status()
        gauges = {
            "waiting": ("Texts that wait to start", status.waiting),
            "lanes": ("Texts that can run at once", len(status.lanes)),
            "used_lanes": ("Texts that run", sum(lane is not None for lane in status.lanes)),
            "pages": ("Pages of the cache", status.pages),
            "used_pages": ("Pages that texts have", status.used_pages),
            "kept_pages": ("Pages without texts that hold what texts may share", status.kept_pages),
        }
        for name, (documentation, value) in gauges.items():
            yield GaugeMetricFamily(f"npu_{name}", documentation, value)
