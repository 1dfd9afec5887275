"""What every request passes first: its number, the key, the limits on its body."""

from __future__ import annotations

import asyncio
import hmac
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from npu_text.serving.errors import APIError

__all__ = ["DIRECT_SEND", "Guard", "GuardOptions", "send_error"]

DIRECT_SEND = "npu.send"
"""Where a scope has the server's own `send`, for parts of a body: whatever is between looks at beginnings alone."""

_OPEN = frozenset({"/", "/health"})


@dataclass(frozen=True)
class GuardOptions:
    """What is let through.

    Attributes:
        keys: Those that clients may have; any, or none, where there are none.
        body: Bytes of a body, at most.
        seconds: In which a body must have arrived.
        requests: That are answered at once, at most.
    """

    keys: Sequence[str] = ()
    body: int = 4 << 20
    seconds: float = 30.0
    requests: int = 2048


class Guard:
    """An application behind these checks."""

    def __init__(self, app: ASGIApp, options: GuardOptions) -> None:
        self._app, self._options, self._running = app, options, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As applications are called."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        number = headers.get(b"x-request-id", uuid.uuid4().hex.encode())[:128]

        async def numbered(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", number)]
            await send(message)

        self._running += 1
        try:
            self._check(scope, headers)
            body = await self._body(receive, headers)
            await self._app({**scope, DIRECT_SEND: send}, _replayed(body, receive), numbered)
        except APIError as error:
            await send_error(error, numbered)
        finally:
            self._running -= 1

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._running > self._options.requests:
            raise APIError("too many requests at once", status=429, kind="rate_limit_error", code="overloaded")
        if not self._options.keys or scope["path"] in _OPEN or scope["method"] == "OPTIONS":
            return
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key.strip() if kind.lower() == b"bearer" else b""
        if not any(hmac.compare_digest(given, own.encode()) for own in self._options.keys):
            raise APIError("the API key is missing or wrong", status=401, code="invalid_api_key")

    async def _body(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        limit = self._options.body
        too_large = APIError(f"the body is larger than {limit} bytes", status=413, code="request_too_large")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._options.seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise APIError("the client left", status=400)
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise APIError(f"the body did not arrive within {self._options.seconds:g} seconds", status=408) from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Gives a body that was read already, then what comes behind it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def send_error(error: APIError, send: Send) -> None:
    """Answers with an error."""
    body = json.dumps(error.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
