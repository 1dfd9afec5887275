"""Kernel text before any compiler sees it: its characters, its preprocessor directives, its words.

What is left is text that the preprocessor can only rearrange: no directive in it reads a file, no macro in it makes a
word that was not looked at here, and no comment or quotation hides anything.
"""

from __future__ import annotations

import re
from typing import NoReturn

from npu_compiler.errors import KernelCompileError

__all__ = ["MAX_EXPANDED", "RefusedSource", "checked_text", "refuse"]

MAX_SOURCE = 1 << 18  # characters; the largest kernels of real models have a tenth of it
MAX_EXPANDED = 1 << 20  # characters after macros are expanded
ALLOWED = (
    "A kernel source holds kernels and plain functions with bodies, structs of plain data, types and constants, "
    "and of the preprocessor conditionals, plain macros and Metal's own includes"
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SPLICE = re.compile(r"(\\|\?\?/)[ \t\r\f\v]*\n")
_FOREIGN = re.compile(r"[^\n\t \w#()\[\]{}<>+\-*/%&|^!~=?:;,.]|\?\?[=/'()!<>-]|%:|<:|:>|<%|%>", re.ASCII)
_NOT_IN_LINE = re.compile(r"[^\n]")
_HASH = re.compile(r"^([^\n#]*)(#[^\n]*)", re.MULTILINE)
_DIRECTIVE = re.compile(
    r"""\#[ ]*(?:
        (?:if|elif)\b[^#]*
      | (?:ifdef|ifndef|undef)[ ]+\w+[ ]*
      | (?:else|endif)[ ]*
      | define[ ]+\w+(?:\([ ]*(?:\w+[ ]*(?:,[ ]*\w+[ ]*)*)?\))?(?:[ ][^#]*)?
      | include[ ]*<(?:metal_\w+|simd/simd\.h)>[ ]*
      | error\b[^#]*
    )\Z""",
    re.VERBOSE | re.ASCII,
)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b[^\n]*", re.MULTILINE)
# The project's kernel files include each other where they stand by themselves, which an artifact's never do.
_OWN_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"\w+\.metal"[ \t]*$', re.MULTILINE | re.ASCII)
# The words of a static_assert.
_MESSAGE = re.compile(r'(?<=, )"[\w .,]*"(?=\);)', re.ASCII)
_OWN_INCLUDE_REACHED = "#error not put together"
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Names of the compiler and of the software GPU's own headers.
_RESERVED = re.compile(r"_[A-Z_]|(?:msl|MSL)(?:_|\Z)", re.ASCII)
_RESERVED_ALLOWED = frozenset({"__METAL__", "__METAL_VERSION__", "__METAL_MACOS__"})

_REFUSED_WORDS = {
    **dict.fromkeys(["extern", "asm", "export", "import", "module"], "nothing outside the source can be named"),
    **dict.fromkeys(["new", "delete"], "MSL has no dynamic memory"),
    **dict.fromkeys(["throw", "try", "catch", "noexcept"], "MSL has no exceptions"),
    **dict.fromkeys(["dynamic_cast", "typeid"], "MSL has no run-time types"),
    **dict.fromkeys(["reinterpret_cast", "const_cast"], "write a cast from one pointer to another as (device T*)p"),
    **dict.fromkeys(["private", "protected", "public", "friend", "this", "explicit"], "a struct holds data only"),
    "class": "write struct, or typename",
    **dict.fromkeys(["auto", "decltype", "typeof"], "a type is written out"),
    **dict.fromkeys(["co_await", "co_return", "co_yield"], "MSL has no coroutines"),
    **dict.fromkeys(["concept", "requires", "consteval", "constinit"], "MSL is C++ of 2017"),
    "double": "MSL has no double",
    "goto": "MSL has no goto",
    "virtual": "MSL has no virtual functions",
    "thread_local": "MSL has no thread_local",
    **dict.fromkeys(["nullptr", "NULL"], "a pointer points into a buffer"),
    "union": "memory is read as another type by as_type",
    "alignas": "types are aligned by what they hold",
    "operator": "operators are those of the language",
    "mutable": "a struct holds data only",
    "wchar_t": "MSL has no such type",
    "char16_t": "MSL has no such type",
    "char32_t": "MSL has no such type",
}


class RefusedSource(KernelCompileError):
    """The source is not in the language of kernels. `problem` says where and why, in one line."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"the kernel source is refused:\n{problem}. {ALLOWED}")


def refuse(line: int, what: str, why: str) -> NoReturn:
    """Refuses the source for a construct that kernels may not hold."""
    raise RefusedSource(f"line {line}: {what}: {why}")


def checked_text(source: str) -> str:
    """The source without comments and includes, each character where it was.

    Raises:
        KernelCompileError: It is too long, or holds a character, a directive or a word that kernels may not hold.
    """
    if len(source) > MAX_SOURCE:
        raise KernelCompileError(
            f"the kernel source has {len(source)} characters, the most is {MAX_SOURCE}. Divide it into several kernels"
        )
    source = source.replace("\r\n", "\n")
    spliced = _SPLICE.search(source)
    if spliced:
        refuse(_line(source, spliced.start()), "a line that goes on in the next", "write it as one line")
    text = _COMMENT.sub(lambda comment: _NOT_IN_LINE.sub(" ", comment[0]), source)
    text = _OWN_INCLUDE.sub(_OWN_INCLUDE_REACHED, text)
    unquoted = _MESSAGE.sub("", text)
    foreign = _FOREIGN.search(unquoted)
    if foreign:
        refuse(_line(unquoted, foreign.start()), repr(foreign[0]), "there are no strings, escapes or other spellings")
    _check_directives(unquoted)
    _check_words(unquoted)
    return _INCLUDE.sub("", text)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _check_directives(text: str) -> None:
    for found in _HASH.finditer(text):
        directive = found[2].replace("\t", " ")
        if found[1].strip() or not _DIRECTIVE.match(directive):
            refuse(_line(text, found.start(2)), f"'{directive.strip()}'", "not one of the directives of kernels")


def _check_words(text: str) -> None:
    for word in sorted({*_WORD.findall(text)}):
        if word in _REFUSED_WORDS:
            why = _REFUSED_WORDS[word]
        elif _RESERVED.match(word) and word not in _RESERVED_ALLOWED:
            why = "names that begin with two underscores, with one and a capital, or with msl_ are the compiler's own"
        else:
            continue
        found = re.search(rf"(?<![\w.]){word}\b", text) or re.search(word, text)
        refuse(_line(text, found.start() if found else 0), f"'{word}'", why)
