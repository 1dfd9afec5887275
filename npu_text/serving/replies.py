"""Answers that end when the client leaves: nothing goes on for nobody."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from npu_text.serving.guard import DIRECT_SEND

__all__ = ["EventStream", "first_of", "unless_gone"]

_LOOK_SECONDS = 1.0  # between two looks at a reader that may be stuck
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def unless_gone(answer: Awaitable[Mapping[str, Any]], request: Request) -> Mapping[str, Any]:
    """Waits for an answer; stops it when the client leaves before.

    Raises:
        ClientDisconnect: It left.
    """
    working = asyncio.ensure_future(answer)
    await first_of(working, request.receive)
    if working.cancelled():
        raise ClientDisconnect
    return working.result()


class EventStream(Response):
    """Server-sent events, as they come.

    A reader that takes nothing for a while is as one that left.
    """

    def __init__(self, first: str, events: AsyncIterator[str], patience: float) -> None:
        """A stream.

        Args:
            first: Its first event; empty for none, when the answer begins before there is one.
            events: Those behind it.
            patience: Seconds for which a reader may take nothing.
        """
        super().__init__()
        self._first, self._events, self._patience = first, events, patience
        self._since = math.inf  # when what is being sent was begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        working = asyncio.ensure_future(self._send(send, scope.get(DIRECT_SEND, send)))
        await first_of(working, receive, self._is_stuck)
        with suppress(OSError, asyncio.CancelledError):  # nobody is there to be told
            working.result()

    async def _send(self, send: Send, send_part: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            if self._first:
                await send_part(_part(self._first))
            async for event in self._events:
                self._since = time.monotonic()
                await send_part(_part(event))
                self._since = math.inf
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._since > self._patience


def _part(event: str) -> Message:
    return {"type": "http.response.body", "body": event.encode(), "more_body": True}


async def first_of(
    working: asyncio.Future[Any], receive: Receive, is_stuck: Callable[[], bool] = lambda: False
) -> None:
    """Waits until something is done, and stops it when the client leaves before, or is stuck."""
    leaving = asyncio.ensure_future(_left(receive))
    try:
        while not (working.done() or leaving.done() or is_stuck()):
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED, timeout=_LOOK_SECONDS)
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait((working, leaving))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
