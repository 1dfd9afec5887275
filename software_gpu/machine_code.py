"""Compiled kernels, read and linked here and never loaded by the host: their code is only run by the device's process,
which can't load anything.

No constructor runs, nothing is looked up in the process, and a library that asks for more than a kernel needs is
refused. Kernels are object files, the native runtime is a shared object.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from npu_compiler.errors import KernelCompileError
from software_gpu.elf import OBJECT, RELOCATIONS, WRITABLE, ElfFile, Symbol
from software_gpu.object_file import ADDRESS, BOUNDS, THREAD, WORD_BYTES, Linked, Word, link_object

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

_SEGMENT_LOAD = 1
_MACHINES = {"x86_64": 62, "aarch64": 183}
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
_DYNAMIC_RELOCATIONS = {
    "x86_64": {8: ADDRESS, 1: ADDRESS, 6: ADDRESS, 7: ADDRESS, 18: THREAD},
    "aarch64": {1027: ADDRESS, 257: ADDRESS, 1025: ADDRESS, 1026: ADDRESS, 1030: THREAD},
}


@dataclass(frozen=True)
class Image:
    """A library as it lies in memory, but for the words that depend on where.

    Attributes:
        content: Its sections or segments, at their addresses from the image's begin.
        symbols: Offsets of what it defines, by name.
        sections: Offset and length of what it keeps in memory, by name.
        variables: Sections of what it would write to.
        words: What depends on where it is placed.
    """

    what: str
    content: bytes
    symbols: Mapping[str, int]
    sections: Mapping[str, tuple[int, int]]
    variables: tuple[str, ...]
    words: tuple[Word, ...]

    def undefined(self) -> set[str]:
        """Names that something else must define."""
        needed = (word.symbol for word in self.words)
        return {symbol.name for symbol in needed if symbol.name and not symbol.defined and not symbol.weak}

    def write(self, address: int) -> None:
        """Puts the content into memory."""
        ctypes.memmove(address, self.content, len(self.content))

    def link(self, address: int, addresses: Mapping[str, int]) -> None:
        """Fills in the words of an image that was written at `address`.

        Args:
            addresses: Of what others define; of a thread's variable, its distance from the thread's memory.
        """
        for word in self.words:
            value = word.addend
            if word.symbol.defined or not word.symbol.name:
                value += address + word.symbol.value
            else:
                value += addresses.get(word.symbol.name, 0)
            ctypes.c_uint64.from_address(address + word.place).value = value % (1 << 64)


def undefined_symbols(code: bytes) -> list[str]:
    """Names that compiled code, for this machine or another, needs from elsewhere."""
    needed = (symbol for symbol in ElfFile(code, "a library").symbols() if not symbol.defined and not symbol.weak)
    return [symbol.name for symbol in needed if symbol.name and symbol.name not in BOUNDS]


def read_image(path: Path, what: str) -> Image:
    """Reads a library for this machine.

    Args:
        path: An object file or a shared object; what follows it in the file is ignored.
        what: What it is, for messages.

    Raises:
        KernelCompileError: It is damaged, or needs what only the system's own linker or loader could give.
    """
    try:
        file = ElfFile(path.read_bytes(), what)
        if file.machine != _MACHINES[platform.machine()]:
            raise file.refused("it was compiled for another architecture")
        variables = tuple(_variables(file))
        if file.kind != OBJECT:
            return _shared_object(file, what, variables)
        linked = Linked(bytearray()) if variables else link_object(file)  # nobody places one that has variables
        return Image(what, bytes(linked.content), linked.symbols, linked.sections, variables, tuple(linked.words))
    except (struct.error, IndexError, ValueError, OverflowError, MemoryError, OSError) as error:
        raise KernelCompileError(f"{what}: the compiled library {path} can't be read ({error}). Delete it") from error


def _variables(file: ElfFile) -> Iterator[str]:
    checked = any(symbol.name.startswith("__ubsan_handle") for symbol in file.symbols())
    constant = (*_LINKED_ONCE, *(_DESCRIPTIONS if checked else ()))
    for section in file.sections:
        name = file.name(section)
        if section.flags & WRITABLE and section.length and not name.startswith(constant):
            yield name


def _shared_object(file: ElfFile, what: str, variables: tuple[str, ...]) -> Image:
    loaded = [s for s in file.segments if s[0] == _SEGMENT_LOAD]
    content = bytearray(max(address + length for _, _, _, address, _, _, length, _ in loaded))
    for _, _, offset, address, _, stored, _, _ in loaded:
        content[address : address + stored] = file.stored(offset, stored)
    symbols = file.symbols()
    sections = {file.name(s): (s.address, s.length) for s in file.sections if s.address}
    defined = {symbol.name: symbol.value for symbol in symbols if symbol.defined}
    words = tuple(_dynamic_words(file, symbols, len(content)))
    return Image(what, bytes(content), defined, sections, variables, words)


def _dynamic_words(file: ElfFile, symbols: Sequence[Symbol], length: int) -> Iterator[Word]:
    kinds = _DYNAMIC_RELOCATIONS[platform.machine()]
    for table in (section for section in file.sections if section.kind == RELOCATIONS):
        for place, number, index, addend in file.relocations(table):
            kind, symbol = kinds.get(number), symbols[index]
            if kind is None or place + WORD_BYTES > length:
                raise file.refused(f"it needs '{symbol.name}' in a way (relocation {number}) that kernels don't")
            yield Word(place, kind, symbol, addend)
