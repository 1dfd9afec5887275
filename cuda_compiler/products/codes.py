"""Matrices that are stored in codes of a byte, which become numbers on their way into a product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cuda_compiler.dialect import CUDA
from cuda_compiler.skeleton import pointer_arguments, pointer_parameters
from npu_compiler.artifact.plan import Argument
from npu_compiler.lowering.dequantisation import number_function
from npu_compiler.lowering.problems.forms import Dequantised
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering

__all__ = ["CodeFunction", "code_function"]


@dataclass(frozen=True)
class CodeFunction:
    """The device function ``number_of`` of a product's codes, and the struct ``Codes`` of what it reads beside them.

    Attributes:
        text: Both; where nothing is codes, a struct without members.
        inputs: What it reads, which the kernel binds behind its operands.
        macros: What the kernel's file needs to be told.
        values: Parameters that it reads.
        are_constant: Whether no kernel of the plan writes the codes, or what makes them numbers.
    """

    text: str
    inputs: tuple[Argument, ...]
    macros: Mapping[str, object]
    values: Mapping[str, int]
    are_constant: bool


def code_function(found: Product, lowering: Lowering) -> CodeFunction:
    """The function for the operand that is codes, if one is.

    Raises:
        OpRefusal: What it reads is too large.
    """
    for position, operand in enumerate(found.operands):
        if isinstance(operand, Dequantised):
            return _function(operand, position, lowering)
    return CodeFunction("struct Codes {};", (), {"CODES": 0, "CODE_PARAMETERS": "", "CODE_ARGUMENTS": ""}, {}, False)


def _function(codes: Dequantised, position: int, lowering: Lowering) -> CodeFunction:
    function = number_function(codes, position, lowering.tensors, CUDA)
    prefix, pointers = function.operands.prefix, function.operands.pointers
    members = [f"{CUDA.pointer_to(dtype)} {prefix}e{number}" for number, (_, dtype) in enumerate(pointers)]
    lines = [
        "struct Codes {",
        *(f"    {member};" for member in members),
        "};",
        "__device__ __forceinline__ float number_of(int code, int row, const Codes& codes, const Params& p)",
        "{",
        *(f"    {member} = codes.{prefix}e{number};" for number, member in enumerate(members)),
        *function.lines,
        f"    return {function.value};",
        "}",
    ]
    macros = {
        "CODES": 1,
        "code_t": CUDA.storage[codes.dtype.name],
        "CODE_PARAMETERS": pointer_parameters(function.operands),
        "CODE_ARGUMENTS": pointer_arguments(function.operands),
    }
    return CodeFunction(
        "\n".join(lines),
        tuple(argument for argument, _ in pointers),
        macros,
        dict(function.operands.fields),
        all(lowering.tensors[index].source is None for index in codes.reads()),
    )
