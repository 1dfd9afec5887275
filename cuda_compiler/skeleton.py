"""Assembles kernel texts: the shared header, the parameter struct, generated parts and a file of `kernels/`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files

from cuda_compiler.dialect import CUDA
from npu_compiler.artifact.plan import KernelSource
from npu_compiler.lowering.dialect import CHECK
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.params import ParamStruct

__all__ = ["QUIET_CHECK", "assemble", "kernel_file", "pointer_arguments", "pointer_parameters"]

QUIET_CHECK = "quiet_index"
"""As `CHECK`, without a record of the fault (checks.cuh)."""


@cache
def kernel_file(name: str) -> str:
    """The text of a file of `kernels/`."""
    return files("cuda_compiler").joinpath("kernels", name).read_text(encoding="utf-8")


def assemble(
    entry: str,
    params: ParamStruct | None,
    macros: Mapping[str, object],
    generated: str,
    *,
    before: Iterable[str] = (),
    after: Iterable[str] = (),
) -> KernelSource:
    """A whole translation unit.

    Args:
        entry: The kernel, which is in the file of that name.
        params: Its parameter struct; None where the generated text declares it.
        macros: What the files expect to be defined.
        generated: Functions that the files call.
        before: Files that the generated functions build on.
        after: Files that build on them, and the kernel's file on those.
    """
    defined = "".join(f"#define {name} {value}".rstrip() + "\n" for name, value in macros.items())
    declaration = "" if params is None else params.declaration
    checks = ["checks.cuh"] if CHECK in generated else []  # where indices are checked
    texts = [kernel_file("common.cuh"), defined, declaration, *map(kernel_file, (*checks, *before)), generated]
    texts += map(kernel_file, (*after, f"{entry}.cuh"))
    return KernelSource(entry, "\n".join(texts))


def pointer_parameters(operands: Operands) -> str:
    """Parameters for the operands' pointers ``e0``, ``e1``..., each with a comma after it."""
    return "".join(
        f"{CUDA.pointer_to(dtype)} {operands.prefix}e{number}, " for number, (_, dtype) in enumerate(operands.pointers)
    )


def pointer_arguments(operands: Operands) -> str:
    """The pointers themselves, each with a comma after it."""
    return "".join(f"{operands.prefix}e{number}, " for number in range(len(operands.pointers)))
