"""What attention kernels compute of their operands themselves: queries, and what is new among keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuda_compiler.dialect import CUDA
from cuda_compiler.skeleton import QUIET_CHECK
from npu_compiler.lowering.anchors import pointer_arguments, pointer_parameters
from npu_compiler.lowering.cache_codes import is_coded
from npu_compiler.lowering.dialect import CHECK
from npu_compiler.lowering.element import ElementFunction, element_function
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import Paged, Scattered
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue
from npu_compiler.tensor.expr import Expr

__all__ = ["FUNCTION_MACROS", "Functions", "functions_of", "new_rows"]

FUNCTION_MACROS = "OPERAND_PARAMETERS OPERAND_ARGUMENTS"
"""What `Functions.macros` defines for a kernel's file."""

_PLACE = "_place"  # ends the names of functions that say where a new row of a cache goes


@dataclass(frozen=True)
class Functions:
    """Device functions that compute elements of operands, each with the parameters of all: they are passed on together.

    Attributes:
        each: The functions.
        reports_late: Whether places that are no places are told of at the end, by one thread. They are needed early, by
            every thread, and a branch that records a fault would have all of them wait for the index there. So this is
            left to a function ``report_...`` of its own.
    """

    each: tuple[ElementFunction, ...]
    reports_late: bool

    @property
    def macros(self) -> dict[str, object]:
        """What the kernel's file is told of what they read."""
        return {
            "OPERAND_PARAMETERS": "".join(pointer_parameters(function.operands, CUDA) for function in self.each),
            "OPERAND_ARGUMENTS": "".join(pointer_arguments(function.operands) for function in self.each),
        }

    @property
    def prologue(self) -> Prologue:
        """What they read, and their text."""
        return Prologue(tuple(function.operands for function in self.each), text=self._text())

    def _text(self) -> str:
        pointers, texts = str(self.macros["OPERAND_PARAMETERS"]), []
        for function in self.each:
            text = function.text(pointers, CUDA)
            if self.reports_late and function.name.endswith(_PLACE):
                texts.append(replace(function, name=f"report_{function.name}").text(pointers, CUDA))
                text = text.replace(f"{CHECK}(", f"{QUIET_CHECK}(")
            texts.append(text)
        return "\n".join(texts)


def new_rows(operand: Operand) -> tuple[Expr, Group] | None:
    """The numbers of rows that are new among keys or values, over the shape of what would store these or their codes,
    and that; None where nothing is new.
    """
    if is_coded(operand):
        return None if operand.fresh is None else (operand.fresh.numbers, operand.fresh.codes)
    made = operand.made if isinstance(operand, Scattered) else operand.fresh if isinstance(operand, Paged) else None
    return None if made is None else (made.expr, made)


def functions_of(problem: Attention, lowering: Lowering, *, one_place: bool) -> Functions:
    """A function ``query_value`` that gives an element of the queries, from memory or computed.

    With new keys and values ``key_value`` and ``value_value`` give theirs.

    Args:
        problem: What is to be computed.
        lowering: Where the trace's tensors are.
        one_place: Whether ``fresh_place`` says where both go; else ``key_place`` and ``value_place`` do.
    """
    wanted = {"query_value": (problem.q.element, problem.q.shape)}
    places: dict[str, tuple[Expr, tuple[int, ...]]] = {}
    for name, operand in (("key", problem.k), ("value", problem.v)):
        rows = new_rows(operand)
        if rows is not None:
            numbers, made = rows
            assert made.index is not None
            wanted[f"{name}_value"] = numbers, made.shape
            (places if one_place else wanted)[f"{name}{_PLACE}"] = made.index, made.shape
    if places:
        wanted[f"fresh{_PLACE}"] = places[f"key{_PLACE}"]
    return Functions(
        tuple(
            element_function(name, expr, shape, lowering.tensors, f"f{number}", CUDA)
            for number, (name, (expr, shape)) in enumerate(wanted.items())
        ),
        reports_late=not one_place,
    )
