"""JSON as the data of devices are written: each row of a table on a line, and what is short."""

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
    line = json.dumps(value)
    if _is_flat(value) and depth and len(line) + len(_INDENT) * depth <= _LONGEST:
        return line
    pad, end = _INDENT * (depth + 1), "\n" + _INDENT * depth
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + end + "}"
    if not isinstance(value, list) or _is_flat(value):
        return line
    rows = (json.dumps(item) if _is_flat(item) else _text(item, depth + 1) for item in value)
    return "[\n" + ",\n".join(pad + row for row in rows) + end + "]"


def _is_flat(value: Any) -> bool:
    """Whether it holds numbers and words alone."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not any(isinstance(item, dict | list) for item in items)
