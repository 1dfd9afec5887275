"""Shared objects of compiled kernels, read and linked here and never loaded by the host: their code is only run by the
device's process, which can't load anything.

No constructor runs, nothing is looked up in the process, and a library that asks for more than a kernel needs is
refused. The format is that of the System V ABI, with its supplements for x86-64 and AArch64.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from npu_compiler.errors import KernelCompileError

__all__ = ["CHECKED_SYMBOLS", "C_LIBRARY_SYMBOLS", "KERNEL_SYMBOLS", "Image", "read_image", "undefined_symbols"]

# The only symbols that a library of kernels may leave to others. One is the native runtime's; calls of the C library's
# are what clang makes of loops and assignments.
C_LIBRARY_SYMBOLS = ("memcpy", "memmove", "memset")
KERNEL_SYMBOLS = frozenset({"msl_worker", *C_LIBRARY_SYMBOLS})
# A checked library tells the native runtime of its accesses (native/checker.cpp).
CHECKED_SYMBOLS = KERNEL_SYMBOLS | {
    *("msl_note_access", "__tsan_init", "__tsan_func_entry", "__tsan_func_exit"),
    *("__tsan_memcpy", "__tsan_memmove", "__tsan_memset"),
    *(f"__tsan_{way}{size}" for way in ("read", "write") for size in (1, 2, 4, 8, 16)),
    *(f"__tsan_unaligned_{way}{size}" for way in ("read", "write") for size in (2, 4, 8, 16)),
    *("__ubsan_handle_out_of_bounds", "__ubsan_handle_local_out_of_bounds_abort"),
}

_FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_WORD = struct.Struct("<Q")
_SEGMENT_LOAD = 1
_SECTION_RELOCATIONS, _SECTION_SYMBOLS = 4, 11
_WRITABLE = 1
_WEAK, _INDIRECT = 2, 10
# What lies in writable memory for the linker's sake, and is never written once linked.
_LINKED_ONCE = (
    ".dynamic",
    ".got",
    ".got.plt",
    ".data.rel.ro",
    ".relro_padding",
    ".init_array",
    ".fini_array",
    ".ctors",
)
_DESCRIPTIONS = (".data",)  # in a checked library: what it says of subscripts that leave their array
_RELATIVE, _ADDRESS, _THREAD = "relative", "address", "thread"
_RELOCATIONS = {
    "x86_64": {8: _RELATIVE, 1: _ADDRESS, 6: _ADDRESS, 7: _ADDRESS, 18: _THREAD},
    "aarch64": {1027: _RELATIVE, 257: _ADDRESS, 1025: _ADDRESS, 1026: _ADDRESS, 1030: _THREAD},
}


@dataclass(frozen=True)
class _Symbol:
    name: str
    defined: bool
    weak: bool
    value: int


@dataclass(frozen=True)
class _Relocation:
    """A word at `place` that becomes an address: the image's own, a symbol's, or one relative to a thread's memory."""

    place: int
    kind: str
    symbol: _Symbol
    addend: int


@dataclass(frozen=True)
class Image:
    """A library as it lies in memory, but for the words that depend on where.

    Attributes:
        content: Its segments, at their addresses from the image's begin.
        symbols: Offsets of what it defines, by name.
        sections: Offset and length of what it keeps in memory, by name.
        variables: Sections of what it would write to.
    """

    what: str
    content: bytes
    symbols: Mapping[str, int]
    sections: Mapping[str, tuple[int, int]]
    variables: tuple[str, ...]
    relocations: tuple[_Relocation, ...]

    def undefined(self) -> set[str]:
        """Names that something else must define."""
        needed = (relocation.symbol for relocation in self.relocations)
        return {symbol.name for symbol in needed if symbol.name and not symbol.defined and not symbol.weak}

    def write(self, address: int) -> None:
        """Puts the content into memory."""
        ctypes.memmove(address, self.content, len(self.content))

    def link(self, address: int, addresses: Mapping[str, int]) -> None:
        """Fills in the words of an image that was written at `address`.

        Args:
            addresses: Of what others define; of a thread's variable, its distance from the thread's memory.
        """
        for relocation in self.relocations:
            value = relocation.addend
            if relocation.kind == _RELATIVE:
                value += address
            elif relocation.symbol.defined:
                value += address + relocation.symbol.value
            else:
                value += addresses.get(relocation.symbol.name, 0)
            ctypes.c_uint64.from_address(address + relocation.place).value = value % (1 << 64)


def undefined_symbols(shared_object: bytes) -> list[str]:
    """Names that a shared object, for this machine or another, needs from elsewhere."""
    symbols = _Reader(shared_object, "a library").symbols()
    return [symbol.name for symbol in symbols if symbol.name and not symbol.defined and not symbol.weak]


def read_image(path: Path, what: str) -> Image:
    """Reads a library for this machine.

    Args:
        path: A shared object; what follows it in the file is ignored.
        what: What it is, for messages.

    Raises:
        KernelCompileError: It is damaged, or needs what only the system's own loader could give.
    """
    try:
        return _Reader(path.read_bytes(), what).image()
    except (struct.error, IndexError, ValueError, OSError) as error:
        raise KernelCompileError(f"{what}: the compiled library {path} can't be read ({error}). Delete it") from error


class _Reader:
    def __init__(self, data: bytes, what: str) -> None:
        self._data, self._what = data, what
        header = _FILE_HEADER.unpack_from(data)
        if header[0][:6] != b"\x7fELF\x02\x01":
            raise self._refused("it is no shared object of 64 bits")
        self._segments = [_SEGMENT.unpack_from(data, header[5] + i * header[9]) for i in range(header[10])]
        self._sections = [_SECTION.unpack_from(data, header[6] + i * header[11]) for i in range(header[12])]
        self._names = self._sections[header[13]]

    def _refused(self, reason: str) -> KernelCompileError:
        return KernelCompileError(f"{self._what}: the compiled library can't run on the software GPU: {reason}")

    def image(self) -> Image:
        content = self._content()
        symbols = self.symbols()
        sections = {self._text(self._names, s[0]): (s[3], s[5]) for s in self._sections if s[3]}
        defined = {symbol.name: symbol.value for symbol in symbols if symbol.defined}
        relocations = tuple(self._relocations(symbols, len(content)))
        return Image(self._what, content, defined, sections, tuple(self._variables()), relocations)

    def _content(self) -> bytes:
        loaded = [s for s in self._segments if s[0] == _SEGMENT_LOAD]
        content = bytearray(max(address + length for _, _, _, address, _, _, length, _ in loaded))
        for _, _, offset, address, _, stored, _, _ in loaded:
            if offset + stored > len(self._data):
                raise IndexError("a segment ends behind the file")
            content[address : address + stored] = self._data[offset : offset + stored]
        return bytes(content)

    def _variables(self) -> Iterator[str]:
        checked = any(symbol.name.startswith("__ubsan_handle") for symbol in self.symbols())
        constant = (*_LINKED_ONCE, *(_DESCRIPTIONS if checked else ()))
        for name, _, flags, _, _, length, *_ in self._sections:
            section = self._text(self._names, name)
            if flags & _WRITABLE and length and not section.startswith(constant):
                yield section

    def symbols(self) -> list[_Symbol]:
        table = next((s for s in self._sections if s[1] == _SECTION_SYMBOLS), None)
        if table is None:
            return []
        names = self._sections[table[6]]
        found = []
        for at in range(table[4], table[4] + table[5], _SYMBOL.size):
            name, info, _, section, value, _ = _SYMBOL.unpack_from(self._data, at)
            if info & 0xF == _INDIRECT:
                raise self._refused(f"'{self._text(names, name)}' is chosen when it is loaded")
            found.append(_Symbol(self._text(names, name), section != 0, info >> 4 == _WEAK, value))
        return found

    def _relocations(self, symbols: list[_Symbol], length: int) -> list[_Relocation]:
        kinds = _RELOCATIONS[platform.machine()]
        found = []
        for table in (s for s in self._sections if s[1] == _SECTION_RELOCATIONS):
            for at in range(table[4], table[4] + table[5], _RELOCATION.size):
                place, info, addend = _RELOCATION.unpack_from(self._data, at)
                kind, symbol = kinds.get(info & 0xFFFFFFFF), symbols[info >> 32]
                if kind is None or place + _WORD.size > length:
                    raise self._refused(
                        f"it needs '{symbol.name}' in a way (relocation {info & 0xFFFFFFFF}) that kernels don't"
                    )
                found.append(_Relocation(place, kind, symbol, addend))
        return found

    def _text(self, table: tuple[int, ...], offset: int) -> str:
        start = table[4] + offset
        return self._data[start : self._data.index(b"\0", start)].decode()
