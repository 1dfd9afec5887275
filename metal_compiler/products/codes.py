"""Matrices that are stored in codes of a byte, which become numbers on their way into a product."""

from __future__ import annotations

from metal_compiler.dialect import METAL
from npu_compiler.lowering.anchors import function, pointer_macros, pointer_parameters
from npu_compiler.lowering.dequantisation import number_function
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.forms import Dequantised
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue

__all__ = ["code_prologues", "loads_codes"]


def loads_codes(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is codes, and the matrix of a product with a vector, or the right one of two matrices."""
    if not isinstance(operand, Dequantised) or not isinstance(group.problem, Product):
        return False
    return position == (0 if group.problem.n == 1 < group.problem.m else 1)


def code_prologues(found: Product, lowering: Lowering) -> dict[str, Prologue]:
    """The function ``number_of`` for the operand that is codes, if one is.

    Raises:
        OpRefusal: What it reads is too large.
    """
    made = [
        _prologue(operand, position, lowering)
        for position, operand in enumerate(found.operands)
        if isinstance(operand, Dequantised)
    ]
    return {"codes": made[0]} if made else {}


def _prologue(codes: Dequantised, position: int, lowering: Lowering) -> Prologue:
    made = number_function(codes, position, lowering.tensors, METAL)
    parameters = pointer_parameters(made.operands, METAL)
    head = f"METAL_FUNC float number_of(int code, int row, {parameters}constant Params& p)"
    macros = {"CODES": 1, **pointer_macros("CODE", made.operands, METAL)}
    return Prologue((made.operands,), macros=macros, text=function(head, made.lines, made.value))
