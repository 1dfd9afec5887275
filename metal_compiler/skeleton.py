"""Assembles kernel texts: the shared header, the parameter struct, and a skeleton of `kernels/`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from string import Template

from metal_compiler.dialect import METAL
from npu_compiler.artifact.plan import KernelSource
from npu_compiler.lowering.dialect import CHECK
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.params import ParamStruct

__all__ = ["assemble", "fill", "kernel_file", "pointer_parameters"]


@cache
def kernel_file(name: str) -> str:
    """The text of a file of `kernels/`."""
    return files("metal_compiler").joinpath("kernels", name).read_text(encoding="utf-8")


def assemble(entry: str, params: ParamStruct | None, body: str, definitions: str = "") -> KernelSource:
    """A translation unit: `common.metal`, definitions, the parameter struct unless `body` has it, and the kernel.

    Where indices are checked, the function for that stands behind `common.metal`.
    """
    declaration = "" if params is None else params.declaration
    files = ["common.metal", *(["checks.metal"] if any(CHECK in part for part in (definitions, body)) else [])]
    return KernelSource(entry, "\n".join((*map(kernel_file, files), definitions, declaration, body)))


def fill(skeleton: str, **parts: object) -> str:
    """A skeleton with its ``$placeholders`` filled in."""
    return Template(kernel_file(skeleton)).substitute({key: str(value) for key, value in parts.items()})


def pointer_parameters(operands: Operands, first: int) -> str:
    """Kernel parameters for the operands' pointers ``e0``, ``e1``... (after their prefix), bound from `first` on."""
    lines = []
    for number, (_, dtype) in enumerate(operands.pointers):
        lines.append(f"    {METAL.pointer_to(dtype)} {operands.prefix}e{number} [[buffer({first + number})]],\n")
    return "".join(lines)
