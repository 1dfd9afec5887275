"""Kernel text that would have NVRTC read a file of the machine, however it is spelled."""

from __future__ import annotations

import pytest

from cuda_runtime.kernel_text import check_kernel_text
from cuda_runtime.nvrtc import compile_kernel
from npu_compiler.errors import KernelCompileError

REFUSED = [
    "#include </etc/hostname>",
    '#include "/etc/hostname"',
    "#inc\\\nlude </etc/hostname>",
    "#define FILE </etc/hostname>\n#include FILE",
    "??=include </etc/hostname>",
    "%:include </etc/hostname>",
    "/* a comment */ # /* and another */ include </etc/hostname>",
    "int a; // \\\n\n#include </etc/hostname>",
    '"/*"\n#include </etc/hostname>\n"*/"',
    "'\"'\n#include </etc/hostname>\n'\"'",
    'R"(")"\n#include </etc/hostname>\nR"(")"',
    'R"(" /* )"\n#include </etc/hostname>\n// */',
    "#define A \\ \n#include </etc/hostname>",
    "1'000\n#include </etc/hostname>\n1'0",
    "int a = 1'0 /* ';\n// */ #include </etc/hostname>\n;",  # whose comment the compiler ends there
    "int a;\r#include </etc/hostname>",
    '#if __has_include("/etc/hostname")\n#endif',
    "#include_next </etc/hostname>",
    "#import </etc/hostname>",
    '#line 1 "/etc/hostname"',
    '_Pragma("include_alias")',
    "x" * (1 << 20) + "x",
]
ALLOWED = """
#define TWICE(x) \\
    ((x) + /* "quoted" */ (x)) // "quoted
#if defined(TWICE) && 1
extern "C" __global__ void k(float *out) {
    #pragma unroll
    for (int i = 0; i < 2; ++i) out[i] = TWICE(out[i]);
    asm volatile("// #include </etc/hostname>");
}
#else
#error no macro
#endif
"""


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: repr(text)[:40])
def test_a_file_of_the_machine_is_not_read(text: str) -> None:
    with pytest.raises(KernelCompileError, match=r"the kernel 'k'"):
        compile_kernel(text, "k", 90)


def test_what_kernels_use_is_allowed() -> None:
    check_kernel_text(ALLOWED, "k")
