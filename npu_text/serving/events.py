"""Server-sent events, of which a server writes one for each token of each stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["DONE", "PING", "TextEvent", "event"]

PING = ": ping\n\n"
DONE = "data: [DONE]\n\n"

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_MARK = "\0text\0"


def event(content: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {_json(content)}\n\n"


class TextEvent:
    """Events that differ in one text alone: what stands ahead of it and behind it is written once."""

    def __init__(self, content: Callable[[str], Mapping[str, Any]]) -> None:
        """From what makes an event's content of a text, which is in there once, behind whatever clients gave."""
        self._ahead, _, self._behind = event(content(_MARK)).rpartition(_json(_MARK))

    def of(self, text: str) -> str:
        """The event of a text."""
        return self._ahead + _json(text) + self._behind
