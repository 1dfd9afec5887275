"""Links the object file of a library of kernels to a piece of memory that works wherever it is put.

Distances within the piece are filled in here. An address, and whatever lies elsewhere, is a word of 64 bits that is
filled in where the piece is placed: code reads it from a table at its end, and calls through a jump beside it. What
relocations mean is said by the supplements of the System V ABI for x86-64 and AArch64.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from software_gpu.elf import RELOCATIONS, ElfFile, Section, Symbol

__all__ = ["ADDRESS", "BOUNDS", "THREAD", "WORD_BYTES", "Linked", "Word", "link_object"]

ADDRESS, THREAD = "address", "thread"
BOUNDS = ("__ehdr_start", "_end")  # names that a linker gives to where all sections begin and end
_ALL = -1  # as a section
_ALLOCATED, _NO_CONTENT = 2, 8
_RESERVED_SECTIONS = 0xFF00  # numbers from here on are no sections
WORD_BYTES, _JUMP_BYTES, _PAGE = 8, 16, 4096


@dataclass(frozen=True)
class Word:
    """64 bits at `place` that become an address, or the distance of a thread's variable from the thread's memory."""

    place: int
    kind: str
    symbol: Symbol
    addend: int


@dataclass
class Linked:
    """A library as it lies in memory, but for the words that depend on where.

    Attributes:
        content: Its sections, then jumps and words.
        symbols: Offsets of what it shares, by name.
        sections: Offset and length, by name.
        words: What is to be filled in.
    """

    content: bytearray
    symbols: dict[str, int] = field(default_factory=dict)
    sections: dict[str, tuple[int, int]] = field(default_factory=dict)
    words: list[Word] = field(default_factory=list)


def link_object(file: ElfFile) -> Linked:
    """Places an object file's sections and fills in what does not depend on where they are put.

    Raises:
        KernelCompileError: It needs something in a way that kernels don't.
        struct.error, IndexError: It is damaged.
    """
    return _Linker(file).linked()


class _Linker:
    def __init__(self, file: ElfFile) -> None:
        self._file = file
        self._begins = {_ALL: 0}
        self._result = Linked(bytearray())
        self._place_sections()
        self._length = len(self._result.content)
        self._symbols = [self._placed(symbol) for symbol in file.symbols()]
        self._table: dict[tuple[int, str], int] = {}
        self._jumps: dict[int, int] = {}
        self._fill_in = _ARM if file.machine == _ARM_MACHINE else _X86

    def linked(self) -> Linked:
        for table in self._file.sections:
            if table.kind == RELOCATIONS and table.info in self._begins:
                for place, kind, index, addend in self._file.relocations(table):
                    self._relocate(self._begins[table.info] + place, kind, index, addend)
        self._result.symbols = {s.name: s.value for s in self._symbols if s.defined and not s.local}
        return self._result

    def _place_sections(self) -> None:
        """Puts the sections one behind the other, those of a name together."""
        file, content = self._file, self._result.content
        kept = [(file.name(s), i, s) for i, s in enumerate(file.sections) if s.flags & _ALLOCATED and s.length]
        for name, index, section in sorted(kept, key=lambda one: (one[0], one[1])):
            if section.alignment > _PAGE:
                raise file.refused(f"'{name}' begins at a multiple of {section.alignment}")
            content.extend(bytes(-len(content) % max(section.alignment, 1)))
            begin = self._begins[index] = len(content)
            content.extend(self._content(section))
            first = self._result.sections.get(name, (begin, 0))[0]
            self._result.sections[name] = first, len(content) - first

    def _content(self, section: Section) -> bytes:
        if section.kind == _NO_CONTENT:
            raise self._file.refused("it has variables at program scope; Metal has only constants there")
        return self._file.stored(section.offset, section.length)

    def _placed(self, symbol: Symbol) -> Symbol:
        """A symbol with its place in the result."""
        if symbol.name in BOUNDS and not symbol.defined:
            return Symbol(symbol.name, _ALL, False, True, 0 if symbol.name == BOUNDS[0] else self._length)
        source_name = symbol.section >= _RESERVED_SECTIONS and not symbol.value
        if source_name or not symbol.defined:
            return symbol
        if symbol.section >= _RESERVED_SECTIONS:
            raise self._file.refused(f"'{symbol.name}' has no place in it")
        begin = self._begins.get(symbol.section, 0)
        return Symbol(symbol.name, symbol.section, symbol.weak, symbol.local, begin + symbol.value)

    def _relocate(self, place: int, kind: int, index: int, addend: int) -> None:
        symbol = self._symbols[index]
        how = self._fill_in.get(kind)
        if how is None or (symbol.defined and symbol.section not in self._begins):
            raise self._needs(symbol, kind)
        if how.through == "word":
            self._result.words.append(Word(self._inside(place, WORD_BYTES), ADDRESS, symbol, addend))
            return
        if how.through in (ADDRESS, THREAD):
            target = self._word_of(index, how.through)
        elif symbol.defined:
            target = symbol.value
        elif how.through == "call":
            target = self._jump_to(index)
        else:
            raise self._needs(symbol, kind)
        at = self._inside(place, how.bytes)
        content = self._result.content
        before = int.from_bytes(content[at : at + how.bytes], "little")
        value = how.value(before, target + addend, place)
        if value is None:
            raise self._needs(symbol, kind)
        content[at : at + how.bytes] = value.to_bytes(how.bytes, "little")

    def _needs(self, symbol: Symbol, kind: int) -> Exception:
        return self._file.refused(f"it needs '{symbol.name}' in a way (relocation {kind}) that kernels don't")

    def _inside(self, place: int, nbytes: int) -> int:
        if place + nbytes > len(self._result.content):
            raise IndexError("a relocation lies behind the code")
        return place

    def _word_of(self, index: int, kind: str) -> int:
        """Where the address of a symbol is kept."""
        if (index, kind) not in self._table:
            place = self._table[index, kind] = self._append(WORD_BYTES)
            self._result.words.append(Word(place, kind, self._symbols[index], 0))
        return self._table[index, kind]

    def _jump_to(self, index: int) -> int:
        """Where a jump to another's function stands."""
        if index not in self._jumps:
            word = self._word_of(index, ADDRESS)
            place = self._jumps[index] = self._append(_JUMP_BYTES)
            jump = (_arm_jump if self._fill_in is _ARM else _x86_jump)(word, place)
            self._result.content[place : place + len(jump)] = jump
        return self._jumps[index]

    def _append(self, nbytes: int) -> int:
        content = self._result.content
        content.extend(bytes(-len(content) % nbytes))
        content.extend(bytes(nbytes))
        return len(content) - nbytes


@dataclass(frozen=True)
class _Kind:
    """How one kind of relocation is filled in.

    Attributes:
        through: What the code reaches: the symbol itself (``place``, or ``call`` where a jump will do), the word that
            holds its ``address`` or a ``thread``'s; or ``word`` where the place is such a word.
        bytes: How many are changed.
        value: What they become, from what they were, the target and the place; None where that has no room for it.
    """

    through: str
    bytes: int = WORD_BYTES
    value: Callable[[int, int, int], int | None] = lambda before, target, place: before


def _distance(bits: int) -> Callable[[int, int, int], int | None]:
    def value(_: int, target: int, place: int) -> int | None:
        distance = target - place
        return distance % (1 << bits) if -(1 << bits - 1) <= distance < 1 << bits - 1 else None

    return value


def _branch(before: int, target: int, place: int) -> int | None:
    """A branch of AArch64 by 26 bits of words of four bytes."""
    distance = target - place
    if distance % 4 or not -(1 << 27) <= distance < 1 << 27:
        return None
    return before & 0xFC000000 | distance >> 2 & 0x3FFFFFF


def _page(before: int, target: int, place: int) -> int | None:
    """The distance in pages, which an ADRP of AArch64 keeps in two parts."""
    pages = target // _PAGE - place // _PAGE
    if not -(1 << 20) <= pages < 1 << 20:
        return None
    return before & 0x9F00001F | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5


def _in_page(scale: int) -> Callable[[int, int, int], int | None]:
    """The place within a page, in units of what an instruction of AArch64 loads."""

    def value(before: int, target: int, _: int) -> int | None:
        place = target % _PAGE
        return None if place % scale else before & 0xFFC003FF | place // scale << 10

    return value


def _x86_jump(word: int, place: int) -> bytes:
    """`jmp *word(%rip)`."""
    return b"\xff\x25" + struct.pack("<i", word - place - 6)


def _arm_jump(word: int, place: int) -> bytes:
    """`adrp x16, word; ldr x17, [x16, word]; br x17`."""
    page, load = _page(0x90000010, word, place), _in_page(8)(0xF9400211, word, place)
    return struct.pack("<3I", page or 0x90000010, load or 0xF9400211, 0xD61F0220)


_ARM_MACHINE = 183
_NEAR, _FAR = _distance(32), _distance(64)
_X86 = {
    1: _Kind("word"),
    2: _Kind("place", 4, _NEAR),
    4: _Kind("call", 4, _NEAR),
    9: _Kind(ADDRESS, 4, _NEAR),
    22: _Kind(THREAD, 4, _NEAR),
    24: _Kind("place", 8, _FAR),
    41: _Kind(ADDRESS, 4, _NEAR),
    42: _Kind(ADDRESS, 4, _NEAR),
}
_ARM = {
    257: _Kind("word"),
    260: _Kind("place", 8, _FAR),
    261: _Kind("place", 4, _NEAR),
    275: _Kind("place", 4, _page),
    277: _Kind("place", 4, _in_page(1)),
    278: _Kind("place", 4, _in_page(1)),
    282: _Kind("call", 4, _branch),
    283: _Kind("call", 4, _branch),
    284: _Kind("place", 4, _in_page(2)),
    285: _Kind("place", 4, _in_page(4)),
    286: _Kind("place", 4, _in_page(8)),
    299: _Kind("place", 4, _in_page(16)),
    311: _Kind(ADDRESS, 4, _page),
    312: _Kind(ADDRESS, 4, _in_page(8)),
    541: _Kind(THREAD, 4, _page),
    542: _Kind(THREAD, 4, _in_page(8)),
}
