"""Kernel parameters: a struct is declared once, here, and its packing and its C text both come from that."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from npu_compiler.errors import CompileError

__all__ = ["CheckNumber", "ParamStruct", "Params", "ints"]

_FORMATS = {"int": "i", "uint": "I", "float": "f"}
_SIZE = 4  # bytes of a field


class CheckNumber(int):
    """A parameter that is the number of an index check, counted from 1: all that tells some launches apart."""


class Params(bytes):
    """Packed parameters some of which are numbers of index checks.

    Attributes:
        checks: The place of each in the bytes, and the number itself.
    """

    checks: Mapping[int, int]

    @classmethod
    def joined(cls, parts: Iterable[bytes]) -> bytes:
        """Structs one after another as one."""
        parts = list(parts)
        checks: dict[int, int] = {}
        for i, part in enumerate(parts):
            if isinstance(part, Params):
                start = sum(map(len, parts[:i]))
                checks |= {start + place: number for place, number in part.checks.items()}
        return cls.of(b"".join(parts), checks)

    @classmethod
    def of(cls, data: bytes, checks: Mapping[int, int]) -> bytes:
        """Bytes in which these places hold numbers of checks; plain ones where none does."""
        if not checks:
            return data
        made = cls(data)
        made.checks = checks
        return made

    def renumbered(self, numbers: Mapping[int, int]) -> bytes:
        """The same parameters with `numbers[n]` in the place of the check `n`."""
        data, checks = bytearray(self), {place: numbers[number] for place, number in self.checks.items()}
        for place, number in checks.items():
            struct.pack_into("<i", data, place, number)
        return self.of(bytes(data), checks)


def ints(*names: str) -> tuple[tuple[str, str], ...]:
    """Fields of type int."""
    return tuple(("int", name) for name in names)


@dataclass(frozen=True)
class ParamStruct:
    """A struct of 4-byte fields, laid out alike in Python, Metal and CUDA.

    Attributes:
        name: Name of the C struct.
        fields: Pairs (type, name); a type is ``int``, ``uint`` or ``float``.
    """

    name: str
    fields: tuple[tuple[str, str], ...]

    @cached_property
    def declaration(self) -> str:
        """The C++ definition, with a check that the compiler lays it out as `pack` does."""
        lines = "".join(f"    {kind} {name};\n" for kind, name in self.fields)
        size = _SIZE * len(self.fields)
        check = f'static_assert(sizeof({self.name}) == {size}, "layout of {self.name}");'
        return f"struct {self.name} {{\n{lines}}};\n{check}\n"

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """The struct's bytes, little-endian; `Params` where values are of `CheckNumber`.

        Args:
            values: Exactly the fields, by name.

        Raises:
            CompileError: A field is missing, unknown or out of range.
        """
        names, layout = self._packing
        if values.keys() != names.keys():
            odd = sorted(values.keys() ^ names.keys())
            raise CompileError(f"parameters of {self.name}: missing or unknown {odd}, expected {[*names]}")
        given = [values[name] for name in names]
        try:
            data = layout.pack(*given)
        except struct.error as error:
            raise CompileError(f"parameters of {self.name}: {dict(values)} do not fit 32 bits ({error})") from error
        return Params.of(data, {_SIZE * i: n for i, n in enumerate(given) if type(n) is CheckNumber})

    @cached_property
    def _packing(self) -> tuple[dict[str, None], struct.Struct]:
        """The fields' names, in order, and how their values are packed."""
        layout = "<" + "".join(_FORMATS[kind] for kind, _ in self.fields)
        return dict.fromkeys(name for _, name in self.fields), struct.Struct(layout)
