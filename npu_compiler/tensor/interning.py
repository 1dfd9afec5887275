"""Interning: equal values are one object, so that they are compared, and found in tables, by identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from threading import RLock
from typing import Any, ClassVar, TypeVar
from weakref import ref

__all__ = ["Interned", "count"]

_T = TypeVar("_T", bound="Interned")


class _Reference(ref[Any]):
    """A weak reference that knows its place in the table."""

    __slots__ = ("key",)
    key: tuple[Any, ...]


_TABLE: dict[tuple[Any, ...], _Reference] = {}
_LOCK = RLock()  # reentrant: to store an object may collect garbage, which forgets others


def _forget(reference: _Reference) -> None:
    """Takes what is gone out of the table, unless its equal has taken its place."""
    with _LOCK:
        if _TABLE.get(reference.key) is reference:
            del _TABLE[reference.key]


@cache
def _defaults(kind: Any) -> tuple[Any, ...]:
    """The default of each field, `MISSING` where there is none."""
    return tuple(field.default for field in fields(kind))


@cache
def _required(kind: Any) -> int:
    """How many fields have no default; they come first."""
    return _defaults(kind).count(MISSING)


class _Interning(type):
    """Gives the object that there is already in place of a new one that equals it."""

    __match_args__: tuple[str, ...]
    key: Callable[..., tuple[Any, ...]] | None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = None
        if kwargs or len(args) < _required(cls):  # the constructor knows the places of names, and what to refuse
            made = type.__call__(cls, *args, **kwargs)
            args = made.parts()
        elif len(args) < len(cls.__match_args__):
            args += _defaults(cls)[len(args) :]
        key = (cls, *args) if cls.key is None else (cls, *cls.key(*args))
        reference = _TABLE.get(key)
        found = None if reference is None else reference()
        if found is not None:
            return found
        if made is None:
            made = type.__call__(cls, *args)
        own = _Reference(made, _forget)
        own.key = key
        if _TABLE.setdefault(key, own) is own:  # in one step, which no other thread sees half done
            return made
        with _LOCK:  # another thread has been here, or what was here is just being forgotten
            found = _TABLE.setdefault(key, own)()
            if found is None:
                _TABLE[key] = own
        return made if found is None else found


class Interned(metaclass=_Interning):
    """Base of frozen dataclasses with ``eq=False``: objects with equal fields are one object while anyone holds it.

    Fields are hashable. What they hold of this kind is compared by identity, so that a key is as short as the node
    itself, however much lies below it. Threads may share them. Pickling and copying give the same object again.

    Attributes:
        key: What two objects of the class have in common where they are one, given their fields, where that is not the
            fields themselves.
    """

    __slots__ = ("__weakref__",)
    __match_args__: tuple[str, ...] = ()
    key: ClassVar[Callable[..., tuple[Any, ...]] | None] = None

    def parts(self) -> tuple[Any, ...]:
        """The fields, in order."""
        return tuple(getattr(self, name) for name in self.__match_args__)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.parts()

    def __copy__(self: _T) -> _T:
        return self

    def __deepcopy__(self: _T, memo: object) -> _T:
        return self


def count() -> int:
    """How many interned objects are alive."""
    return len(_TABLE)
