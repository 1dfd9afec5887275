"""What a compiled library may ask of the process that loads it, and how a shared object is read for it (ELF-64)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["CHECKED_SYMBOLS", "KERNEL_SYMBOLS", "undefined_symbols"]

# The only symbols that a library of kernels may leave to others. The first is the native runtime's; clang makes calls
# of the C library's others from loops and assignments.
KERNEL_SYMBOLS = frozenset({"msl_worker", "memcpy", "memmove", "memset"})
# A checked library tells the native runtime of its accesses (native/checker.cpp).
CHECKED_SYMBOLS = KERNEL_SYMBOLS | {
    *("msl_note_access", "__tsan_init", "__tsan_func_entry", "__tsan_func_exit"),
    *("__tsan_memcpy", "__tsan_memmove", "__tsan_memset"),
    *(f"__tsan_{way}{size}" for way in ("read", "write") for size in (1, 2, 4, 8, 16)),
    *(f"__tsan_unaligned_{way}{size}" for way in ("read", "write") for size in (2, 4, 8, 16)),
}

_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC_SYMBOLS = 11  # section type SHT_DYNSYM
_WEAK = 2  # symbols that may stay without a definition


def undefined_symbols(shared_object: bytes) -> list[str]:
    """Names that a shared object needs from elsewhere, in its own order."""
    sections = list(_sections(shared_object))
    names: list[str] = []
    for kind, offset, size, link in sections:
        if kind != _DYNAMIC_SYMBOLS:
            continue
        strings = sections[link][1]
        for name, info, _, section, _, _ in _SYMBOL.iter_unpack(shared_object[offset : offset + size]):
            if name and not section and info >> 4 != _WEAK:
                start = strings + name
                names.append(shared_object[start : shared_object.index(b"\0", start)].decode())
    return names


def _sections(shared_object: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Type, offset, size and linked section of each section."""
    header = _HEADER.unpack_from(shared_object)
    offset, entry_size, count = header[5], header[10], header[11]
    for number in range(count):
        section = _SECTION.unpack_from(shared_object, offset + number * entry_size)
        yield section[1], section[4], section[5], section[6]
