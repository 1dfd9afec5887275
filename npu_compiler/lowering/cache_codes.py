"""Attention over keys and values in codes of a byte, with a scale for each row: what every target makes of it."""

from __future__ import annotations

from typing import TypeGuard

from npu_compiler.dtypes import FLOAT32, INT32, DType
from npu_compiler.lowering.dialect import Dialect, LeafNames, Printer
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import CodedPages, CodedRows
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.tensor.coded import LARGEST, decoded
from npu_compiler.tensor.expr import Call, Expr, Load, Ref
from npu_compiler.tensor.view import View

__all__ = [
    "PAGE_SCALE_MACROS",
    "SCALE_MACROS",
    "Coded",
    "is_coded",
    "number_of_code",
    "scale_macros",
    "value_unit",
    "without_unlike_codes",
]

Coded = CodedRows | CodedPages
"""Keys or values of attention in codes: in order, or in pages."""

SCALE_MACROS = "k_scale_t v_scale_t K_SCALE_BATCH K_SCALE_HEAD K_SCALE_ROW V_SCALE_BATCH V_SCALE_HEAD V_SCALE_ROW"
"""What `scale_macros` defines; of pages `PAGE_SCALE_MACROS` as well."""
PAGE_SCALE_MACROS = "K_SCALE_PAGE V_SCALE_PAGE"


def number_of_code(kind: DType, dialect: Dialect) -> tuple[tuple[str, ...], str]:
    """Statements over an integer ``code``, and their result, a float: its number.

    Args:
        kind: The data type whose codes they are.
        dialect: The language.
    """
    code = Load(Ref(0, View((), ())), INT32)
    expr: Expr = decoded(code, kind) if kind.coding else Call("cast", (code,), FLOAT32)
    printer = Printer(dialect, LeafNames({}, {}, {}))
    printer.define(code, "code")
    value = printer.value(expr)
    return tuple(printer.lines), value


def is_coded(operand: Operand | None) -> TypeGuard[Coded]:
    """Whether an operand of attention is in codes."""
    return isinstance(operand, Coded)


def scale_macros(k: Coded, v: Coded, dialect: Dialect) -> dict[str, object]:
    """Types of the scales of keys and values, and elements from one to the next, as kernels' files are told of them."""
    macros: dict[str, object] = {}
    for name, operand in (("k", k), ("v", v)):
        macros[f"{name}_scale_t"] = dialect.storage[operand.scale.dtype.name]
        for dim, stride in zip(("BATCH", "HEAD", "ROW"), operand.scale.strides, strict=False):
            macros[f"{name.upper()}_SCALE_{dim}"] = stride
        if isinstance(operand, CodedPages):
            macros[f"{name.upper()}_SCALE_PAGE"] = operand.scale_stride
    return macros


def value_unit(kind: DType) -> float:
    """What weights are multiplied by beside the scale of a value's row.

    The scale is the largest number of the row over the largest code. So weights, in half precision, are as large as
    what they add to the result, and never too large where the values themselves would not be. It is a power of two.
    """
    return float(2 ** (int(LARGEST[kind]).bit_length() - 1))


def without_unlike_codes(problem: Attention) -> list[Group]:
    """What makes numbers of codes where keys and values are not both codes of one type; else nothing."""
    found = [operand for operand in (problem.k, problem.v) if isinstance(operand, CodedRows)]
    if len(found) == 2 and found[0].kind == found[1].kind:
        return []
    return [operand.made for operand in found]
