"""What attention kernels compute of their operands themselves: queries, and what is new among keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cuda_compiler.dialect import CUDA
from cuda_compiler.packing import each_element, packed_loads, with_packs
from cuda_compiler.skeleton import QUIET_CHECK
from npu_compiler.lowering.anchors import pointer_arguments, pointer_parameters
from npu_compiler.lowering.cache_codes import is_coded
from npu_compiler.lowering.dialect import CHECK, Printer
from npu_compiler.lowering.element import ElementFunction, element_function
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.operands import Operands
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import Paged, Scattered
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue
from npu_compiler.tensor.expr import Expr

__all__ = ["FUNCTION_MACROS", "Functions", "functions_of", "new_rows"]

FUNCTION_MACROS = "OPERAND_PACK OPERAND_PARAMETERS OPERAND_ARGUMENTS"
"""What `Functions.macros` defines for a kernel's file."""

_PACK = 4  # neighbours of a row that a thread computes together; rows are whole chunks of twice as many
_PLACE = "_place"  # ends the names of functions that say where a new row of a cache goes


@dataclass(frozen=True)
class _Pack:
    """A function that computes neighbours of a row: of these, what lies side by side is loaded at once.

    Where that lies, the struct ``..._places``, may be found ahead of it.
    """

    name: str
    expr: Expr
    operands: Operands

    def text(self, pointers: str, arguments: str) -> str:
        loads = packed_loads(self.operands, [self.expr], _PACK)
        printer = Printer(CUDA, with_packs(self.operands, loads).names, " " * 8)
        value = printer.value(self.expr)
        place, numbers = f"{self.name}_places", range(len(loads))
        lines = [
            f"struct {place} {{",
            *(f"    int64 x{n};" for n in numbers),
            "",
            f"    {CUDA.inline} void settle_all() {{ {' '.join(f'settle(x{n});' for n in numbers)} }}",
            "};",
            f"{CUDA.inline} {place} find_{place}(int batch, int head, int row, int col, {pointers}{CUDA.params})",
            "{",
            f"    return {{{', '.join(f'int64({load.address})' for load in loads)}}};",
            "}",
            f"{CUDA.inline} void {self.name}(",
            f"    float (&value)[{_PACK}], const {place}& places, int batch, int head, int row, int col,",
            f"    {pointers}{CUDA.params})",
            "{",
            *(
                f"    const Pack<{load.storage}, {_PACK}> x{n} = {load.source_at(f'places.x{n}')};"
                for n, load in enumerate(loads)
            ),
            *each_element("col", _PACK, "    "),
            *printer.lines,
            f"        value[u] = {value};",
            "    }",
            "}",
            f"{CUDA.inline} void {self.name}(",
            f"    float (&value)[{_PACK}], int batch, int head, int row, int col, {pointers}{CUDA.params})",
            "{",
            f"    const {place} places = find_{place}(batch, head, row, col, {arguments}p);",
            f"    {self.name}(value, places, batch, head, row, col, {arguments}p);",
            "}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Functions:
    """Device functions that compute elements of operands, each with the parameters of all: they are passed on together.

    Attributes:
        each: What they compute, as functions of one element.
        packs: Functions of neighbours of a row.
        elements: Names of those of `each` that are called.
        reports_late: Whether places that are no places are told of at the end, by one thread. They are needed early, by
            every thread, and a branch that records a fault would have all of them wait for the index there. So this is
            left to a function ``report_...`` of its own.
    """

    each: tuple[ElementFunction, ...]
    packs: tuple[_Pack, ...]
    elements: frozenset[str]
    reports_late: bool

    @property
    def macros(self) -> dict[str, object]:
        """What the kernel's file is told of what they read."""
        return {
            "OPERAND_PACK": _PACK,
            "OPERAND_PARAMETERS": "".join(pointer_parameters(function.operands, CUDA) for function in self.each),
            "OPERAND_ARGUMENTS": "".join(pointer_arguments(function.operands) for function in self.each),
        }

    @property
    def prologue(self) -> Prologue:
        """What they read, and their text."""
        return Prologue(tuple(function.operands for function in self.each), text=self._text())

    def _text(self) -> str:
        pointers, arguments = (str(self.macros[f"OPERAND_{which}"]) for which in ("PARAMETERS", "ARGUMENTS"))
        texts = []
        for function in (function for function in self.each if function.name in self.elements):
            text = function.text(pointers, CUDA)
            if self.reports_late and function.name.endswith(_PLACE):
                texts.append(replace(function, name=f"report_{function.name}").text(pointers, CUDA))
                text = text.replace(f"{CHECK}(", f"{QUIET_CHECK}(")
            texts.append(text)
        return "\n".join([*texts, *(pack.text(pointers, arguments) for pack in self.packs)])


def new_rows(operand: Operand) -> tuple[Expr, Group] | None:
    """The numbers of rows that are new among keys or values, over the shape of what would store these or their codes,
    and that; None where nothing is new.
    """
    if is_coded(operand):
        return None if operand.fresh is None else (operand.fresh.numbers, operand.fresh.codes)
    made = operand.made if isinstance(operand, Scattered) else operand.fresh if isinstance(operand, Paged) else None
    return None if made is None else (made.expr, made)


def functions_of(
    problem: Attention, lowering: Lowering, *, one_place: bool, packs: bool = False, elements: bool = False
) -> Functions:
    """A function ``query_pack`` that gives ``OPERAND_PACK`` neighbours of the queries, from memory or computed.

    Args:
        problem: What is to be computed.
        lowering: Where the trace's tensors are.
        one_place: Whether ``fresh_place`` says where both new keys and new values go; else ``key_place`` and
            ``value_place`` do.
        packs: Whether ``key_pack`` and ``value_pack`` give these.
        elements: Whether ``key_value`` and ``value_value`` do, one at a time.
    """
    numbers, places = {"query": (problem.q.element, problem.q.shape)}, {}
    for name, operand in (("key", problem.k), ("value", problem.v)):
        rows = new_rows(operand)
        if rows is not None:
            new, made = rows
            assert made.index is not None
            numbers[name] = new, made.shape
            places["fresh" if one_place else name] = made.index, made.shape
    wanted = {f"{name}_value": expr for name, expr in numbers.items()}
    wanted |= {f"{name}{_PLACE}": expr for name, expr in places.items()}
    each = {
        name: element_function(name, expr, shape, lowering.tensors, f"f{number}", CUDA)
        for number, (name, (expr, shape)) in enumerate(wanted.items())
    }
    found = (
        _Pack(f"{name}_pack", expr, each[f"{name}_value"].operands)
        for name, (expr, _) in numbers.items()
        if packs or name == "query"
    )
    called = each.keys() - {"query_value"} if elements else {f"{name}{_PLACE}" for name in places}
    return Functions((*each.values(),), (*found,), frozenset(called), reports_late=not one_place)
