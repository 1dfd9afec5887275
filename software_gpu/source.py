"""Metal source as given: macros expanded, read into kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping

from software_gpu.msl_parser import SourceText
from software_gpu.toolchain import find_toolchain

__all__ = ["preprocess"]

_MACROS = {"__METAL__": "1", "__METAL_VERSION__": "310", "__METAL_MACOS__": "1"}
_METAL_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(metal_\w+|simd/simd\.h)>[^\n]*", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?!pragma)\w", re.MULTILINE)


def preprocess(source: str, macros: Mapping[str, str]) -> SourceText:
    """The source with macros expanded, read into tokens and kernels.

    Metal's own includes are left out: the headers of the software GPU stand for them.

    Raises:
        KernelCompileError: The preprocessor refused it, or a kernel in it is not understood.
    """
    text = _METAL_INCLUDE.sub("", source)
    if macros or _DIRECTIVE.search(text):
        text = find_toolchain().preprocess(f'#line 1 "program_source"\n{text}', {**_MACROS, **macros})
    return SourceText(text)
