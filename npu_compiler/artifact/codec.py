"""Frozen dataclasses to plain lists and back, with every type checked on the way in.

A dataclass becomes the list of its fields, an enum its value, a union of dataclasses a pair (index, fields), what may
be missing None or itself. `decode` trusts nothing: what does not fit the annotation is refused with the path to it.
What only a target understands it leaves as plain data, `Unread`.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from npu_compiler.artifact.extension import Extension, Unread
from npu_compiler.dtypes import DType, dtype
from npu_compiler.errors import IRError, ProgramFormatError

__all__ = ["decode", "encode"]

Decoder = Callable[[Any, str], Any]
_MAX_NESTING = 16
_PLAIN = (bool, int, float, str, bytes, type(None))


def encode(value: Any) -> Any:
    """`value` as msgpack can hold it: dataclasses, enums, data types, tuples, mappings and scalars."""
    kind: Any = type(value)
    encoder = _encoder(kind)
    return value if encoder is None else encoder(value)


@cache
def _encoder(kind: Any) -> Callable[[Any], Any] | None:
    """The encoder of a type, if it needs one."""
    if kind is DType:
        return attrgetter("name")
    if kind in (tuple, list):
        return lambda value: [encode(item) for item in value]
    if dataclasses.is_dataclass(kind):
        return _dataclass_encoder(kind)
    if issubclass(kind, Mapping):
        return lambda value: {key: encode(value[key]) for key in sorted(value)}
    return attrgetter("value") if issubclass(kind, Enum) else None


def _dataclass_encoder(kind: Any) -> Callable[[Any], list[Any]]:
    """The encoder of a dataclass: of all its fields, those that are plain by their annotation stay as they are."""
    names = [field.name for field in dataclasses.fields(kind)]
    encoders = [_field_encoder(_hints(kind)[name]) for name in names]
    further = [(place, encoder) for place, encoder in enumerate(encoders) if encoder is not None]
    take = attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]

    def run(value: Any) -> list[Any]:
        fields = list(take(value))
        for place, encoder in further:
            if fields[place] is not None:
                fields[place] = encoder(fields[place])
        return fields

    return run


def _field_encoder(hint: Any) -> Callable[[Any], Any] | None:
    """The encoder of a field, if it needs one; an element of a union of dataclasses carries its index in the union."""
    if hint in _PLAIN:
        return None
    element = get_args(hint)[0] if get_origin(hint) is tuple else None
    if element is not None and all(argument in (int, str, Ellipsis) for argument in get_args(hint)):
        return list
    if isinstance(element, type) and dataclasses.is_dataclass(element) and get_args(hint)[1:] == (Ellipsis,):
        return lambda items: [*map(_encoder(element) or encode, items)]
    numbers = {alternative: number for number, alternative in enumerate(_alternatives(element))}
    if not numbers:
        return encode
    return lambda items: [[numbers[type(item)], encode(item)] for item in items]


def decode(kind: Any, data: Any, path: str = "program") -> Any:
    """Builds a value of the type `kind` from what `encode` gave.

    Raises:
        ProgramFormatError: `data` does not fit `kind`; the message has the path to the offending value.
    """
    return _decoder(kind)(data, path)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _alternatives(hint: Any) -> list[type]:
    if get_origin(hint) in (Union, UnionType) and all(dataclasses.is_dataclass(a) for a in get_args(hint)):
        return list(get_args(hint))
    return []


def _refuse(path: str, data: Any, expected: str) -> ProgramFormatError:
    # repr() of what a file holds may be as large as the file, or nested too deep to print.
    given = reprlib.repr(data)
    return ProgramFormatError(f"{path}: given {given}, expected {expected}; the file is damaged, compile it again")


@cache
def _decoder(kind: Any) -> Decoder:
    alternatives = _alternatives(kind)
    if alternatives:
        return _union_decoder(alternatives)
    if get_origin(kind) is UnionType and type(None) in get_args(kind):
        return _optional_decoder(*(a for a in get_args(kind) if a is not type(None)))
    if get_origin(kind) is tuple:
        return _tuple_decoder(get_args(kind))
    if get_origin(kind) is dict:
        return _dict_decoder(*get_args(kind))
    if kind is DType:
        return _dtype_decoder
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum_decoder(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind)
    if isinstance(kind, type) and issubclass(kind, Extension):
        return lambda data, path: Unread(_plain_decoder(data, path))
    if kind is object:
        return _plain_decoder
    return _scalar_decoder(kind)


def _union_decoder(alternatives: list[type]) -> Decoder:
    decoders = [_decoder(alternative) for alternative in alternatives]

    def run(data: Any, path: str) -> Any:
        pair = isinstance(data, list) and len(data) == 2 and type(data[0]) is int
        if not pair or not 0 <= data[0] < len(decoders):
            raise _refuse(path, data, f"a pair of an index below {len(decoders)} and fields")
        return decoders[data[0]](data[1], path)

    return run


def _optional_decoder(kind: Any) -> Decoder:
    decode_present = _decoder(kind)
    return lambda data, path: None if data is None else decode_present(data, path)


def _tuple_decoder(args: tuple[Any, ...]) -> Decoder:
    variable = len(args) == 2 and args[1] is Ellipsis
    decoders = [_decoder(args[0])] if variable else [_decoder(a) for a in args]

    def run(data: Any, path: str) -> Any:
        if not isinstance(data, list) or (not variable and len(data) != len(decoders)):
            raise _refuse(path, data, "a list" if variable else f"a list of {len(decoders)}")
        chosen = decoders * len(data) if variable else decoders
        return tuple(d(item, f"{path}[{i}]") for i, (d, item) in enumerate(zip(chosen, data, strict=True)))

    return run


def _dict_decoder(key: Any, value: Any) -> Decoder:
    decode_key, decode_value = _decoder(key), _decoder(value)

    def run(data: Any, path: str) -> Any:
        if not isinstance(data, dict):
            raise _refuse(path, data, "a mapping")
        return {decode_key(k, path): decode_value(v, f"{path}.{k}") for k, v in data.items()}

    return run


def _dtype_decoder(data: Any, path: str) -> DType:
    try:
        return dtype(data if isinstance(data, str) else "")
    except IRError:
        raise _refuse(path, data, "the name of a data type") from None


def _enum_decoder(kind: type[Enum]) -> Decoder:
    def run(data: Any, path: str) -> Any:
        if data not in [member.value for member in kind]:
            raise _refuse(path, data, f"one of {[member.value for member in kind]}")
        return kind(data)

    return run


def _dataclass_decoder(kind: type) -> Decoder:
    fields = dataclasses.fields(kind)
    decoders = [(f.name, _decoder(_hints(kind)[f.name])) for f in fields]

    def run(data: Any, path: str) -> Any:
        if not isinstance(data, list) or len(data) != len(decoders):
            raise _refuse(path, data, f"the {len(decoders)} fields of {kind.__name__}")
        values = [d(item, f"{path}.{name}") for (name, d), item in zip(decoders, data, strict=True)]
        return kind(*values)

    return run


def _plain_decoder(data: Any, path: str, depth: int = 0) -> Any:
    if depth > _MAX_NESTING:
        raise _refuse(path, data, f"at most {_MAX_NESTING} levels of nesting")
    if isinstance(data, list):
        return [_plain_decoder(item, path, depth + 1) for item in data]
    if isinstance(data, dict):
        return {key: _plain_decoder(item, path, depth + 1) for key, item in data.items()}
    if not isinstance(data, _PLAIN):
        raise _refuse(path, data, "a number, text, bytes, or a list or mapping of them")
    return data


def _scalar_decoder(kind: Any) -> Decoder:
    def run(data: Any, path: str) -> Any:
        if kind is float and type(data) is int:
            return float(data)
        if type(data) is not kind:
            raise _refuse(path, data, f"a value of type {kind.__name__}")
        return data

    return run
