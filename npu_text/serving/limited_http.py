"""HTTP read in C, with limits on everything of a request that is not its body."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from npu_text.serving.errors import APIError

__all__ = ["http_protocol"]

_MOST_BYTES = 64 << 10  # as h11 has it, which reads requests where httptools is not installed


def http_protocol(seconds: float = 30.0) -> Any:
    """What uvicorn takes as ``http``.

    httptools keeps the lines at the head of a request, and those behind a body in chunks, however many and long they
    are, and uvicorn neither counts them nor waits for them in vain. The body is limited by what stands in front of the
    application (`guard`).

    Args:
        seconds: In which the head of a request must have arrived, from its first byte on or, of the first one, from
            the connection on; who is later is disconnected.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "auto"

    class LimitedHTTP(HttpToolsProtocol):
        _beside = 0  # bytes that came since the last one of a body
        _patience: asyncio.TimerHandle | None = None  # with a head that has not arrived

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._has_head()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._beside += len(data)
            super().data_received(data)
            if self._beside > _MOST_BYTES and not self.transport.is_closing():
                self.send_400_response(f"more than {_MOST_BYTES} bytes of a request are not its body")

        def on_message_begin(self) -> None:
            self._expect_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._has_head()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._beside = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._beside = 0
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            """As the class does, in the API's form: for what is no HTTP, too."""
            body = json.dumps(APIError(msg).body)
            lines = ("HTTP/1.1 400 Bad Request", "content-type: application/json", f"content-length: {len(body)}")
            self.transport.write("\r\n".join([*lines, "connection: close", "", body]).encode("ascii"))
            self.transport.close()

        def _expect_head(self) -> None:
            if self._patience is None:
                self._patience = self.loop.call_later(seconds, self.transport.close)

        def _has_head(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return LimitedHTTP
