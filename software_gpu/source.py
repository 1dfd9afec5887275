"""Metal source as given: looked at, macros expanded, read into kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping

from npu_compiler.errors import KernelCompileError
from software_gpu.language import check_language
from software_gpu.msl_parser import SourceText, tokenize
from software_gpu.source_text import MAX_EXPANDED, checked_text
from software_gpu.toolchain import find_toolchain

__all__ = ["preprocess"]

_MACROS = {"__METAL__": "1", "__METAL_VERSION__": "310", "__METAL_MACOS__": "1"}
_DIRECTIVE = re.compile(r"^[ \t]*#", re.MULTILINE)


def preprocess(source: str, macros: Mapping[str, str]) -> SourceText:
    """The source with macros expanded, read into tokens and kernels.

    Metal's own includes are left out: the headers of the software GPU stand for them.

    Raises:
        KernelCompileError: It is not in the language of kernels, the preprocessor refused it, or a kernel in it is not
            understood.
    """
    text = checked_text(source)
    if macros or _DIRECTIVE.search(text):
        text = find_toolchain().preprocess(f'#line 1 "program_source"\n{text}', {**_MACROS, **macros})
    if len(text) > MAX_EXPANDED:
        raise KernelCompileError(
            f"the kernel source has {len(text)} characters when its macros are expanded, the most is {MAX_EXPANDED}. "
            "Divide it into several kernels"
        )
    tokens = tokenize(text)
    check_language(tokens)
    return SourceText(text, tokens)
