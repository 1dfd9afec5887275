"""Figures of a server for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from npu_text.batching.driver import Driver
from npu_text.serving.core import Listener

__all__ = ["Metrics"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics(Listener, Collector):
    """Counts what a core tells, and asks its driver how it stands."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._driver: Driver | None = None
        own = {"registry": self.registry, "namespace": "npu"}
        self._first = Histogram("first_token_seconds", "From a request to its first token", buckets=_SECONDS, **own)
        self._next = Histogram("next_token_seconds", "From a token to the next", buckets=_SECONDS, **own)
        self._turn = Histogram("turn_seconds", "A turn of the device", buckets=_SECONDS, **own)
        self._ended = Counter("texts", "Texts that ended, by why", ["finish"], **own)
        self._prompt = Counter("prompt_tokens", "Tokens of prompts", **own)
        self._shared = Counter("shared_prompt_tokens", "Tokens of prompts that were in the cache already", **own)
        self._added = Counter("added_tokens", "Tokens that were chosen", **own)
        self.registry.register(self)

    def watch(self, driver: Driver) -> None:
        """Tells how a driver stands, too."""
        self._driver = driver

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def more_tokens(self, seconds: float, count: int) -> None:
        for _ in range(count):
            self._next.observe(seconds / count)

    def ended(self, finish: str, prompt: int, shared: int, added: int) -> None:
        self._ended.labels(finish).inc()
        self._prompt.inc(prompt)
        self._shared.inc(shared)
        self._added.inc(added)

    def turn(self, seconds: float, filled: int, lanes: int) -> None:
        self._turn.observe(seconds)

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
