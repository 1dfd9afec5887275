"""Server-sent events, of which a server writes one for each token of each stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, TypeVar

__all__ = ["PING", "SECONDS_OF_EVENT", "EventPace", "TextEvent", "ending", "event"]

_Stream = TypeVar("_Stream")

PING = ": ping\n\n"
_DONE = "data: [DONE]\n\n"

# Of time for each event of a stream, on average. An event takes the loop a sixth to a quarter as long: were each token
# an event, they would fill the time of short steps, and new requests, whose lanes are idle until they are read, and the
# engine's thread would wait for the loop's.
SECONDS_OF_EVENT = 240e-6

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_MARK = "\0text\0"


def event(content: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {_json(content)}\n\n"


def ending(told: str, last: Mapping[str, Any] | None) -> str:
    """The end of a stream, as one part: each part is sent, and wakes the client, by itself.

    Args:
        told: Events that have not been sent yet.
        last: What the last one says; None for nothing.
    """
    return told + ("" if last is None else event(last)) + _DONE


class EventPace:
    """Spreads the events of all streams over the time that there is for them."""

    def __init__(self, each: float = SECONDS_OF_EVENT) -> None:
        """From the time for each event, in the units of what `due` is told."""
        self._each, self._events, self._looked = each, 0.0, 0.0

    def due(self, waiting: Iterable[_Stream], streams: int, now: float) -> list[_Stream]:
        """Those of the streams with news that are told now, the first ones; the others wait for their turn.

        Args:
            waiting: Streams with news.
            streams: How many there are, with news or without.
            now: The time.
        """
        self._events = min(self._events + (now - self._looked) / self._each, max(1, streams))
        self._looked = now
        told = list(islice(waiting, int(self._events)))
        self._events -= len(told)
        return told


class TextEvent:
    """Events that differ in one text alone: what stands ahead of it and behind it is written once."""

    def __init__(self, content: Callable[[str], Mapping[str, Any]]) -> None:
        """From what makes an event's content of a text, which is in there once, behind whatever clients gave."""
        self._ahead, _, self._behind = event(content(_MARK)).rpartition(_json(_MARK))

    def of(self, text: str) -> str:
        """The event of a text."""
        return self._ahead + _json(text) + self._behind
