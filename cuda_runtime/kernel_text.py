"""CUDA kernel text before NVRTC sees it: none of its preprocessor directives may read a file.

NVRTC runs in this process and opens what an `#include` names by its whole path, with no include path given, and quotes
it in its messages. The kernels that the compiler writes include nothing.
"""

from __future__ import annotations

import re
from typing import NoReturn

from npu_compiler.errors import KernelCompileError

__all__ = ["check_kernel_text"]

_MAX_CHARACTERS = 1 << 20
# Not characters: a quotation mark may also divide the digits of a number, and what a compiler then sees as a comment
# would be the inside of a character here. Kernels have neither, so that the mark is foreign.
_HIDDEN = re.compile(r'(?P<raw>\b(?:u8|[uUL])?R")|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_HASH = re.compile(r"^(?P<before>[^\n#]*)(?P<directive>#[^\n]*)", re.MULTILINE)
_DIRECTIVE = re.compile(
    r"""\#[ \t]*(?:
        (?:if|ifdef|ifndef|elif|undef)[ \t(!].*
      | (?:else|endif)[ \t]*
      | (?:define|error)[ \t]+.*
      | pragma[ \t]+unroll\b.*
    )\Z""",
    re.VERBOSE,
)
# Spellings that would hide a directive or a quotation, and words of the preprocessor that look at files.
_FOREIGN = re.compile(
    r"\\|\?\?[=/'()!<>-]|%:|[\r\f\v\0]|\"|'|/\*|\b(?:_Pragma|__pragma|__FILE__|__BASE_FILE__|__has_\w+)\b"
)


def check_kernel_text(text: str, entry: str) -> None:
    """Refuses a translation unit whose directives are not those of kernels.

    Args:
        text: CUDA C++.
        entry: A kernel in it, for messages.

    Raises:
        KernelCompileError: With the directive.
    """
    if len(text) > _MAX_CHARACTERS:
        raise KernelCompileError(
            f"the kernel '{entry}' has {len(text)} characters, the most is {_MAX_CHARACTERS}; compile the model again"
        )
    # What the preprocessor joins is joined, and what it sees as one is taken out.
    plain = _HIDDEN.sub(lambda found: found["raw"] or " ", text.replace("\r\n", "\n").replace("\\\n", ""))
    foreign = _FOREIGN.search(plain)
    if foreign:
        _refuse(foreign[0], entry)
    for found in _HASH.finditer(plain):
        if found["before"].strip() or not _DIRECTIVE.match(found["directive"]):
            _refuse(found["directive"].strip(), entry)


def _refuse(what: str, entry: str) -> NoReturn:
    raise KernelCompileError(
        f"the kernel '{entry}' is refused: {what!r} may not stand in kernel text. Of the preprocessor it "
        "may use conditionals, #define, #error and #pragma unroll, and it includes no file; compile the model again"
    )
