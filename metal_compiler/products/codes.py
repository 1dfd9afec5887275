"""Matrices that are stored in codes of a byte, which become numbers on their way into a product."""

from __future__ import annotations

from metal_compiler.anchors import Prologue
from metal_compiler.dialect import METAL
from npu_compiler.lowering.dequantisation import number_function
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Dequantised
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering

__all__ = ["code_prologues", "loads_codes"]


def loads_codes(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is codes, and the matrix of a product with a vector, or the right one of two matrices."""
    if not isinstance(operand, Dequantised) or not isinstance(group.problem, Product):
        return False
    return position == (0 if group.problem.n == 1 < group.problem.m else 1)


def code_prologues(found: Product, lowering: Lowering) -> list[Prologue]:
    """The function ``number_of`` for the operand that is codes, if one is.

    Raises:
        OpRefusal: What it reads is too large.
    """
    return [
        _prologue(operand, position, lowering)
        for position, operand in enumerate(found.operands)
        if isinstance(operand, Dequantised)
    ]


def _prologue(codes: Dequantised, position: int, lowering: Lowering) -> Prologue:
    function = number_function(codes, position, lowering.tensors, METAL)
    pointers = function.operands.pointers
    names = [f"{function.operands.prefix}e{number}" for number in range(len(pointers))]
    parameters = "".join(
        f"{METAL.pointer_to(dtype)} {name}, " for name, (_, dtype) in zip(names, pointers, strict=True)
    )
    lines = [
        f"METAL_FUNC float number_of(int code, int row, {parameters}constant Params& p)",
        "{",
        *function.lines,
        f"    return {function.value};",
        "}",
    ]
    definitions = {
        "CODES": 1,
        "CODE_PARAMETERS": parameters,
        "CODE_ARGUMENTS": "".join(f"{name}, " for name in names),
    }
    return Prologue(function.operands, dict(function.operands.fields), definitions, 0, "\n".join(lines))
