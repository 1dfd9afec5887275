"""HTTP read in C, with a limit on everything of a request that is not its body."""

from __future__ import annotations

from typing import Any

__all__ = ["http_protocol"]

_MOST_BYTES = 64 << 10  # as h11 has it, which reads requests where httptools is not installed


def http_protocol() -> Any:
    """What uvicorn takes as ``http``.

    httptools keeps the lines at the head of a request, and those behind a body in chunks, however many and long they
    are, and uvicorn does not count them. The body is limited by what stands in front of the application (`guard`).
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "auto"

    class LimitedHTTP(HttpToolsProtocol):
        _beside = 0  # bytes that came since the last one of a body

        def data_received(self, data: bytes) -> None:
            self._beside += len(data)
            super().data_received(data)
            if self._beside > _MOST_BYTES and not self.transport.is_closing():
                self.send_400_response(f"more than {_MOST_BYTES} bytes of a request are not its body")

        def on_body(self, body: bytes) -> None:
            self._beside = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._beside = 0
            super().on_message_complete()

    return LimitedHTTP
