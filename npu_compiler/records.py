"""Frozen dataclasses that are changed many times while a model is compiled."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

__all__ = ["changed"]

_T = TypeVar("_T")


def changed(record: _T, **values: Any) -> _T:
    """As `dataclasses.replace`, for records that keep their fields in a dictionary and check nothing when made.

    It takes the fields over as they are; to call the constructor of a frozen dataclass takes several times as long.
    What a record has cached is left behind.
    """
    kind: Any = type(record)
    names = _fields(kind)
    made: Any = object.__new__(kind)
    state: dict[str, Any] = made.__dict__
    state.update(record.__dict__)
    if len(state) > len(names):
        for cached in state.keys() - names:
            del state[cached]
    state.update(values)
    if len(state) > len(names):
        raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(state.keys() - names))}")
    result: _T = made
    return result


@cache
def _fields(kind: Any) -> frozenset[str]:
    if hasattr(kind, "__post_init__") or any(getattr(base, "__slots__", ()) for base in kind.__mro__):
        raise TypeError(f"{kind.__name__} keeps its fields elsewhere, or checks them; use dataclasses.replace")
    return frozenset(field.name for field in fields(kind))
