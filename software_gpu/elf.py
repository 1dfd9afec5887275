"""Object files and shared objects as the compiler writes them: the format of the System V ABI, of 64 bits."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from npu_compiler.errors import KernelCompileError

__all__ = ["OBJECT", "RELOCATIONS", "WRITABLE", "ElfFile", "Section", "Symbol"]

OBJECT = 1  # of the types of files
_SYMBOLS, RELOCATIONS = 2, 4  # of the types of sections
_DYNAMIC_SYMBOLS = 11
WRITABLE = 1
_LOCAL, _WEAK, _INDIRECT = 0, 2, 10

_FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")


class Section(NamedTuple):
    """Of a section: where it is to lie, where it lies in the file, and to which others it refers."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    length: int
    link: int
    info: int
    alignment: int
    entry_bytes: int


@dataclass(frozen=True)
class Symbol:
    """A name and what it stands for: a place, in an object file that of a section; without a section, another's."""

    name: str
    section: int
    weak: bool
    local: bool
    value: int

    @property
    def defined(self) -> bool:
        return self.section != 0


class ElfFile:
    """A file's tables.

    Attributes:
        kind: `OBJECT`, or another.
        machine: The ABI's number of the processor's architecture.
        segments: Kind, flags, offset, address, physical address, bytes in the file, bytes in memory, alignment.
    """

    def __init__(self, data: bytes, what: str) -> None:
        """Reads the header and its tables.

        Args:
            what: Of which kernels it is, for messages.
        """
        self.data, self._what = data, what
        header = _FILE_HEADER.unpack_from(data)
        if header[0][:6] != b"\x7fELF\x02\x01":
            raise self.refused("it is no code of 64 bits")
        self.kind, self.machine = header[1], header[2]
        self.segments = [_SEGMENT.unpack_from(data, header[5] + i * header[9]) for i in range(header[10])]
        self.sections = [Section(*_SECTION.unpack_from(data, header[6] + i * header[11])) for i in range(header[12])]
        self._names = self.sections[header[13]]

    def refused(self, reason: str) -> KernelCompileError:
        """The error for a library that asks for more than kernels have."""
        return KernelCompileError(f"{self._what}: the compiled library can't run on the software GPU: {reason}")

    def name(self, section: Section) -> str:
        return self._text(self._names, section.name)

    def symbols(self) -> list[Symbol]:
        """All of an object file; of a shared object what it shares, and what it needs."""
        kind = _SYMBOLS if self.kind == OBJECT else _DYNAMIC_SYMBOLS
        table = next((section for section in self.sections if section.kind == kind), None)
        if table is None:
            return []
        names = self.sections[table.link]
        found = []
        for at in range(table.offset, table.offset + table.length, _SYMBOL.size):
            name, info, _, section, value, _ = _SYMBOL.unpack_from(self.data, at)
            if info & 0xF == _INDIRECT:
                raise self.refused(f"'{self._text(names, name)}' is chosen when it is loaded")
            bound = info >> 4
            found.append(Symbol(self._text(names, name), section, bound == _WEAK, bound == _LOCAL, value))
        return found

    def relocations(self, table: Section) -> Iterator[tuple[int, int, int, int]]:
        """The rows of a table: place, kind, index of the symbol, addend."""
        for at in range(table.offset, table.offset + table.length, _RELOCATION.size):
            place, info, addend = _RELOCATION.unpack_from(self.data, at)
            yield place, info & 0xFFFFFFFF, info >> 32, addend

    def stored(self, offset: int, length: int) -> bytes:
        """A piece of the file, which must be whole."""
        if offset + length > len(self.data):
            raise IndexError("a piece ends behind the file")
        return self.data[offset : offset + length]

    def _text(self, table: Section, offset: int) -> str:
        start = table.offset + offset
        return self.data[start : self.data.index(b"\0", start)].decode()
