"""JSON as the data of devices are written: what holds numbers alone takes one line."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["text"]

_INDENT = "  "
_LONGEST = 160  # characters of an object on one line


def text(value: Any) -> str:
    """A document, with a line break at its end."""
    return _text(value, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    if not isinstance(value, dict | list):
        return json.dumps(value)
    items = value.values() if isinstance(value, dict) else value
    if not any(isinstance(item, dict | list) for item in items):
        line = json.dumps(value)
        if isinstance(value, list) or (depth and len(line) + len(_INDENT) * depth <= _LONGEST):
            return line
    pad, end = _INDENT * (depth + 1), "\n" + _INDENT * depth
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + end + "}"
    return "[\n" + ",\n".join(pad + _text(item, depth + 1) for item in value) + end + "]"
