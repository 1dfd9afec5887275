"""How a module nests the tensors that it returns, as plain data that JSON and artifacts hold.

A structure is the index of an output, or an object with one key that says what is nested: ``{"tuple": [...]}``,
``{"list": [...]}``, ``{"dict": [[key, structure], ...]}``, ``{"namedtuple": [[name, structure], ...]}``, ``{"fields":
[[name, structure], ...]}`` for other classes whose fields have names, or ``{"constant": value}`` for what is no tensor.
``{"dict": [["logits", 0], ["states", {"tuple": [1, 2]}]]}`` stands for ``{"logits": a, "states": (b, c)}``. Without a
structure, a single output stands for itself and several are a tuple.
"""

from __future__ import annotations

import json
import reprlib
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from keyword import iskeyword
from typing import Any
from unicodedata import normalize

from npu_compiler.errors import IRError

__all__ = ["Structure", "build", "output_names", "parse_structure", "read_structure", "usual_structure"]

Structure = int | dict[str, Any]
_MAX_DEPTH = 32
_KEYED, _LISTED = ("dict", "namedtuple", "fields"), ("tuple", "list")


def usual_structure(count: int) -> Structure:
    """What `count` outputs are returned as where nothing else is said."""
    return 0 if count == 1 else {"tuple": list(range(count))}


def read_structure(value: object, count: int) -> Structure:
    """Checks a structure of `count` outputs; None stands for the usual one.

    Raises:
        IRError: It is no structure, or does not hold each output once and in order.
    """
    if value is None:
        return usual_structure(count)
    found = list(_leaves(value, (), 0))
    if [index for index, _ in found] != list(range(count)):
        raise _refusal(value, f"the outputs 0 to {count - 1}, each once and in order")
    return value  # type: ignore[return-value]  # checked


def parse_structure(text: str, count: int) -> Structure:
    """Reads a structure from JSON text, as an artifact holds it; empty text stands for the usual one.

    Raises:
        IRError: As `read_structure`.
    """
    try:
        return read_structure(json.loads(text) if text else None, count)
    except (ValueError, RecursionError) as error:
        raise _refusal(text, f"JSON ({error})") from error


def output_names(structure: Structure, tensors: Sequence[str]) -> tuple[str, ...]:
    """Names for the outputs, each different: where the module gave keys, the path to the output, such as
    ``hidden.0``; elsewhere the name of its tensor.

    Args:
        structure: How the outputs are nested.
        tensors: Name of the tensor behind each output.
    """
    paths = [path for _, path in _leaves(structure, (), 0)]
    keyed = [".".join(map(str, path)) if any(isinstance(key, str) for key in path) else "" for path in paths]
    reserved, taken, names = set(keyed), set[str](), []
    for key, tensor in zip(keyed, tensors, strict=True):
        name, number = key or tensor, 0
        while name in taken or (not key and name in reserved):
            number += 1
            name = f"{key or tensor}_{number}"
        taken.add(name)
        names.append(name)
    return tuple(names)


def build(structure: Structure, values: Sequence[Any], fields: Callable[[dict[str, Any]], Any]) -> Any:
    """The nested value whose tensors are `values`; `fields` makes an object of what has named fields."""
    if isinstance(structure, int):
        return values[structure]
    ((kind, items),) = structure.items()
    if kind == "constant":
        return items
    if kind in _LISTED:
        built = [build(item, values, fields) for item in items]
        return tuple(built) if kind == "tuple" else built
    members = {key: build(item, values, fields) for key, item in items}
    if kind == "namedtuple":
        return _named_tuple(tuple(members))(*members.values())
    return fields(members) if kind == "fields" else members


@cache
def _named_tuple(names: tuple[str, ...]) -> Any:
    return namedtuple("Outputs", names)


def _leaves(value: object, path: tuple[str | int, ...], depth: int) -> Iterator[tuple[int, tuple[str | int, ...]]]:
    """Index and path of each output; of the path, keys are text, and places in a tuple or list are numbers."""
    if type(value) is int:
        yield value, path
        return
    kind, content = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else (None, None)
    if depth > _MAX_DEPTH or kind not in (*_KEYED, *_LISTED, "constant"):
        kinds = ", ".join((*_LISTED, *_KEYED, "constant"))
        raise _refusal(value, f"an index, or an object with one of {kinds}, nested at most {_MAX_DEPTH} deep")
    if kind == "constant":
        if not isinstance(content, bool | int | float | str | None):
            raise _refusal(content, "a number, text or null as a constant")
        return
    if not isinstance(content, list):
        raise _refusal(content, "a list of what is nested")
    if kind in _LISTED:
        for position, item in enumerate(content):
            yield from _leaves(item, (*path, position), depth + 1)
        return
    keys: set[object] = set()
    for item in content:
        pair = isinstance(item, list) and len(item) == 2 and _is_key(item[0])
        if not pair or item[0] in keys or not (kind == "dict" or _is_name(item[0], kind)):
            raise _refusal(item, "a pair of a key of its own and what is nested")
        keys.add(item[0])
        yield from _leaves(item[1], (*path, str(item[0])), depth + 1)


def _is_key(key: object) -> bool:
    """Whether it is plain, and no text that UTF-8 cannot hold: halves of surrogate pairs."""
    is_text = isinstance(key, str) and not any("\ud800" <= character <= "\udfff" for character in key)
    return is_text or isinstance(key, bool | int | float)


def _is_name(key: object, kind: str) -> bool:
    """Whether a field can be called so. Python knows names that differ in compatible characters alone for one."""
    if not isinstance(key, str) or (kind == "namedtuple" and iskeyword(key)):
        return False
    return key.isidentifier() and not key.startswith("_") and normalize("NFKC", key) == key


def _refusal(given: object, expected: str) -> IRError:
    return IRError(
        f"the structure of the outputs: given {reprlib.repr(given)}, expected {expected}; extract the model again"
    )
