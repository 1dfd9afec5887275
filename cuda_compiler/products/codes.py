"""Matrices that are stored in codes of a byte, which become numbers on their way into a product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cuda_compiler.dialect import CUDA
from npu_compiler.codings import SmallFloat
from npu_compiler.dtypes import BFLOAT16, INT8, DType
from npu_compiler.lowering.anchors import function, pointer_macros
from npu_compiler.lowering.dequantisation import number_function
from npu_compiler.lowering.problems.forms import Dequantised
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue

__all__ = ["CODE_MACROS", "CodeFunction", "code_function", "number_macros"]

CODE_MACROS = "CODES CODE_PARAMETERS CODE_ARGUMENTS"


@dataclass(frozen=True)
class CodeFunction:
    """The device function ``number_of`` of a product's codes, and the struct ``Codes`` of what it reads beside them.

    Attributes:
        text: Both; where nothing is codes, a struct without members.
        macros: What the kernel's file needs to be told.
        prologues: What they read, which the kernel binds as its input ``codes``.
        are_constant: Whether no kernel of the plan writes the codes, or what makes them numbers.
    """

    text: str
    macros: Mapping[str, object]
    prologues: Mapping[str, Prologue]
    are_constant: bool


def code_function(found: Product, lowering: Lowering) -> CodeFunction:
    """The function for the operand that is codes, if one is.

    Raises:
        OpRefusal: What it reads is too large.
    """
    for position, operand in enumerate(found.operands):
        if isinstance(operand, Dequantised):
            return _function(operand, position, lowering)
    return CodeFunction("struct Codes {};", {"CODES": 0, "CODE_PARAMETERS": "", "CODE_ARGUMENTS": ""}, {}, False)


def _function(codes: Dequantised, position: int, lowering: Lowering) -> CodeFunction:
    made = number_function(codes, position, lowering.tensors, CUDA)
    prefix, pointers = made.operands.prefix, made.operands.pointers
    members = [f"{CUDA.pointer_to(dtype)} {prefix}e{number}" for number, (_, dtype) in enumerate(pointers)]
    head = f"{CUDA.inline} float number_of(int code, int row, const Codes& codes, const Params& p)"
    taken = (f"    {member} = codes.{prefix}e{number};" for number, member in enumerate(members))
    struct = ["struct Codes {", *(f"    {member};" for member in members), "};"]
    macros = {"CODES": 1, **pointer_macros("CODE", made.operands, CUDA)}
    return CodeFunction(
        "\n".join((*struct, function(head, (*taken, *made.lines), made.value))),
        macros,
        {"codes": Prologue((made.operands,))},
        all(lowering.tensors[index].source is None for index in codes.reads()),
    )


def number_macros(number: DType, vector: DType) -> dict[str, object]:
    """What `grouped_codes.cuh` needs to be told of what a code is.

    Args:
        number: Its data type: an integer or an 8-bit float.
        vector: The half precision that it becomes.
    """
    coding = number.coding
    mantissa, scale = 0, 0
    if isinstance(coding, SmallFloat):
        exponent, width, bias = (8, 7, 127) if vector == BFLOAT16 else (5, 10, 15)
        mantissa = coding.mantissa
        scale = (bias + bias - ((1 << (coding.exponent - 1)) - 1)) << width
        assert scale < 1 << (exponent + width)
    return {
        "CODE_KIND": "CODES_FLOAT" if coding else "CODES_SIGNED" if number == INT8 else "CODES_UNSIGNED",
        "FLOAT_MANTISSA": mantissa,
        "FLOAT_SCALE": f"{scale * 0x10001:#x}u",
    }
