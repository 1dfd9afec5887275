"""The server before several others: hands requests on, and tells how all of them stand together."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from npu_text.serving.errors import APIError
from npu_text.serving.events import event
from npu_text.serving.guard import Guard, GuardOptions
from npu_text.serving.replicas import Replicas
from npu_text.serving.replies import first_of
from npu_text.serving.routing import Router, count_texts

__all__ = ["make_front"]

_LARGE = 64 << 10  # bytes of a body that may take longer to read than others should wait
_LOOK_SECONDS = 10.0  # for an answer about how a server stands
_OWN = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect"))
_NOT_ASKED = _OWN | {b"host", b"content-length"}
_NOT_ANSWERED = _OWN | {b"date", b"server", b"x-request-id"}  # said by the server before


def make_front(replicas: Replicas, guard: GuardOptions, reader: float = 60.0) -> ASGIApp:
    """The application before servers that run; it starts them again when they end, and ends them when it stops.

    Args:
        replicas: Which.
        guard: What is let through.
        reader: Seconds for which the reader of an answer may take nothing.
    """
    return Guard(_Front(replicas, reader), guard)


class _Front:
    def __init__(self, replicas: Replicas, reader: float) -> None:
        self._replicas, self._reader = replicas, reader
        self._router = Router(len(replicas.all))
        self._sessions: list[aiohttp.ClientSession] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As applications are called."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        about = {"/health": self._health, "/metrics": self._metrics, "/status": self._status}.get(scope["path"])
        if about is not None and scope["method"] == "GET":
            await (await about())(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        relay = _Relay(send)
        working = asyncio.ensure_future(self._hand_on(scope, body, relay))
        await first_of(working, receive, lambda: relay.waited() > self._reader)
        if not working.cancelled():
            working.result()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        for replica in self._replicas.all:
            # A connection for each request: of one that is kept nobody knows whether the server still reads it.
            connector = aiohttp.UnixConnector(str(replica.path), limit=0, force_close=True)
            self._sessions.append(
                aiohttp.ClientSession(
                    connector=connector,
                    timeout=aiohttp.ClientTimeout(total=None),
                    auto_decompress=False,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
                )
            )
        keeping = asyncio.ensure_future(self._replicas.keep(self._router.forget))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        keeping.cancel()
        await asyncio.wait([keeping])
        await asyncio.to_thread(self._replicas.stop)
        for session in self._sessions:
            await session.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _hand_on(self, scope: Scope, body: bytes, relay: _Relay) -> None:
        """Answers as one of the servers does."""
        count = count_texts if scope["method"] == "POST" else (lambda _: 0)
        texts = await asyncio.to_thread(count, body) if len(body) > _LARGE else count(body)
        gone: set[int] = set()
        while True:
            ready = [number for number in self._replicas.ready if number not in gone]
            if not ready:
                raise APIError("no server is ready; each of them is being started again", status=503)
            number = self._router.choose(ready, body)
            with self._router.asking(number, texts):
                try:
                    await self._ask(number, scope, body, relay)
                    return
                except aiohttp.ClientConnectorError:  # it has gone, and nobody has noticed yet; it was told nothing
                    gone.add(number)
                except aiohttp.ClientError:
                    await relay.break_off(f"{self._replicas.all[number].name} ended meanwhile; ask again")
                    return

    async def _ask(self, number: int, scope: Scope, body: bytes, relay: _Relay) -> None:
        query = scope["query_string"]
        path = (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")
        url = URL(f"http://replica/{path.decode('latin-1').removeprefix('/')}", encoded=True)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in _kept(scope["headers"])]
        async with self._sessions[number].request(
            scope["method"], url, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            has_failed = answer.status == 503  # its device has, and does not come back in that process
            self._replicas.all[number].is_ready &= not has_failed
            await relay.take(answer)
            if has_failed:
                self._replicas.all[number].kill()

    async def _of_all(self, path: str) -> list[bytes]:
        """What those that are ready answer; those are left out that do not."""
        timeout = aiohttp.ClientTimeout(total=_LOOK_SECONDS)

        async def one(number: int) -> bytes | None:
            try:
                async with self._sessions[number].get(f"http://replica{path}", timeout=timeout) as answer:
                    return await answer.read() if answer.status == 200 else None
            except (aiohttp.ClientError, TimeoutError):
                return None

        found = await asyncio.gather(*(one(number) for number in self._replicas.ready))
        return [each for each in found if each is not None]

    async def _health(self) -> Response:
        count, ready = len(self._replicas.all), len(await self._of_all("/health"))
        if not ready:
            raise APIError(f"none of {count} servers is ready", status=503)
        return JSONResponse({"status": "ok", "replicas": count, "ready": ready})

    async def _metrics(self) -> Response:
        told = [each.decode() for each in await self._of_all("/metrics")]
        registry = CollectorRegistry()
        registry.register(_Sums(told, len(self._replicas.all), len(self._replicas.ready)))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _status(self) -> Response:
        """Lists one behind another, and sums of all else."""
        sums: dict[str, Any] = {}
        for each in await self._of_all("/status"):
            status: Mapping[str, Any] = json.loads(each)
            sums = {name: sums[name] + value if sums else value for name, value in status.items()}
        return JSONResponse(sums)


class _Relay:
    """An answer on its way from a server to a client."""

    def __init__(self, send: Send) -> None:
        self._send_message = send
        self._since = math.inf  # when what is being sent was begun
        self._started = self._is_stream = False

    def waited(self) -> float:
        """Seconds since the client took something, or was given something to take."""
        return time.monotonic() - self._since

    async def take(self, answer: aiohttp.ClientResponse) -> None:
        """Sends an answer as it comes."""
        headers = _kept(answer.raw_headers, _NOT_ANSWERED)
        self._is_stream = answer.content_type == "text/event-stream"
        self._started = True
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        async for part in answer.content.iter_any():
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def break_off(self, message: str) -> None:
        """Says that there is no more, and why, where there is a way to say it.

        Raises:
            APIError: Nothing was sent before: this is the answer.
        """
        error = APIError(message, status=503)
        if not self._started:
            raise error
        if self._is_stream:
            await self._send({"type": "http.response.body", "body": event(error.body).encode(), "more_body": False})

    async def _send(self, message: dict[str, Any]) -> None:
        self._since = time.monotonic()
        await self._send_message(message)
        self._since = math.inf


def _kept(headers: Sequence[tuple[bytes, bytes]], without: frozenset[bytes] = _NOT_ASKED) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in without]


class _Sums(Collector):
    """Figures of several servers, each the sum of theirs."""

    def __init__(self, told: Sequence[str], count: int, ready: int) -> None:
        self._told = told
        self._own = {"replicas": ("Servers behind this one", count), "ready_replicas": ("Of them, ready", ready)}

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        families: dict[str, Metric] = {}
        sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = defaultdict(dict)
        for text in self._told:
            for family in text_string_to_metric_families(text):
                if family.name.endswith("_created"):  # a time of day
                    continue
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    key = sample.name, tuple(sample.labels.items())
                    sums[family.name][key] = sums[family.name].get(key, 0.0) + sample.value
        for name, family in families.items():
            for (sample_name, labels), value in sums[name].items():
                family.add_sample(sample_name, dict(labels), value)
            yield family
        for name, (documentation, number) in self._own.items():
            yield GaugeMetricFamily(f"npu_{name}", documentation, number)
