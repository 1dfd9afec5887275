"""Keys and values in codes of a byte, with a scale for each head and position, which attention reads as they are."""

from __future__ import annotations

from metal_compiler.dialect import METAL
from npu_compiler.artifact.plan import Argument
from npu_compiler.dtypes import FLOAT8_E4M3FN, FLOAT32, INT8
from npu_compiler.lowering.anchors import function
from npu_compiler.lowering.cache_codes import (
    PAGE_SCALE_MACROS,
    SCALE_MACROS,
    Coded,
    is_coded,
    number_of_code,
    scale_macros,
    value_unit,
)
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import CodedRows
from npu_compiler.lowering.problems.operand import Operand

__all__ = ["CODE_MACROS", "are_known_codes", "code_inputs", "code_macros", "code_text", "loads_coded_rows"]

CODE_MACROS = "".join(
    f"{name}? " for name in (f"CODES VALUE_UNIT K_SCALES_AT V_SCALES_AT {SCALE_MACROS} {PAGE_SCALE_MACROS}").split()
)
"""What `code_macros` defines for a kernel's file."""


def loads_coded_rows(group: Group, position: int, operand: Operand) -> bool:
    """Whether keys or values are codes that `attention.metal` reads."""
    return isinstance(operand, CodedRows) and isinstance(group.problem, Attention) and are_known_codes(operand)


def are_known_codes(operand: Coded) -> bool:
    """Whether the file knows codes of this type; it rounds none itself."""
    return operand.kind in (INT8, FLOAT8_E4M3FN) and operand.fresh is None


def code_macros(problem: Attention) -> dict[str, object]:
    """What the file is told of keys and values in codes; nothing where they are numbers."""
    if not is_coded(problem.k) or not is_coded(problem.v):
        return {}
    first = 3 + (problem.mask is not None) + (problem.sinks is not None)
    macros: dict[str, object] = {
        "CODES": 1,
        "VALUE_UNIT": METAL.literal(value_unit(problem.v.kind), FLOAT32),
        "K_SCALES_AT": first,
        "V_SCALES_AT": first + 1,
    }
    return {**macros, **scale_macros(problem.k, problem.v, METAL)}


def code_inputs(problem: Attention) -> dict[str, Argument]:
    """The scales of keys and of values in codes."""
    if not is_coded(problem.k) or not is_coded(problem.v):
        return {}
    return {"k_scales": problem.k.scale.argument, "v_scales": problem.v.scale.argument}


def code_text(problem: Attention) -> str:
    """The function ``number_of`` of a code; empty where keys and values are numbers."""
    if not is_coded(problem.k):
        return ""
    return function("METAL_FUNC float number_of(int code)", *number_of_code(problem.k.kind, METAL))
