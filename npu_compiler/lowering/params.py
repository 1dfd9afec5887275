"""Kernel parameters: a struct is declared once, here, and its packing and its C text both come from that."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from npu_compiler.errors import CompileError

__all__ = ["ParamStruct", "ints"]

_FORMATS = {"int": "i", "uint": "I", "float": "f"}


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
        size = 4 * len(self.fields)
        check = f'static_assert(sizeof({self.name}) == {size}, "layout of {self.name}");'
        return f"struct {self.name} {{\n{lines}}};\n{check}\n"

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """The struct's bytes, little-endian.

        Args:
            values: Exactly the fields, by name.

        Raises:
            CompileError: A field is missing, unknown or out of range.
        """
        names = [name for _, name in self.fields]
        if set(values) != set(names):
            odd = sorted(set(values) ^ set(names))
            raise CompileError(f"parameters of {self.name}: missing or unknown {odd}, expected {names}")
        layout = "<" + "".join(_FORMATS[kind] for kind, _ in self.fields)
        try:
            return struct.pack(layout, *(values[name] for name in names))
        except struct.error as error:
            raise CompileError(f"parameters of {self.name}: {dict(values)} do not fit 32 bits ({error})") from error
