"""Functions of kernels that compute one element of an operand from its position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from npu_compiler.lowering.anchors import function, pointer_macros, pointer_parameters
from npu_compiler.lowering.dialect import Dialect, Printer
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of
from npu_compiler.lowering.operands import Operands, merge_groups
from npu_compiler.lowering.problems.forms import Computed
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.scan import Scan
from npu_compiler.lowering.problems.sort import Sort
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue
from npu_compiler.tensor.expr import Expr
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import View

__all__ = ["ELEMENT_MACROS", "ElementFunction", "element_function", "element_prologue", "loads_element"]

_POSITIONS = ("batch", "head", "row", "col")
ELEMENT_MACROS = "SOURCE_PARAMETERS SOURCE_ARGUMENTS"
"""What `element_prologue` defines for a kernel's file."""


@dataclass(frozen=True)
class ElementFunction:
    """A function of a position in four dimensions.

    Attributes:
        name: Its name.
        register: Type of its result.
        lines: Its statements.
        value: Its result.
        operands: What it reads.
    """

    name: str
    register: str
    lines: tuple[str, ...]
    value: str
    operands: Operands

    def text(self, pointers: str, dialect: Dialect) -> str:
        """The function, taking `pointers`, each with a comma after it, behind the position."""
        parameters = f"{', '.join(f'int {name}' for name in _POSITIONS)}, {pointers}{dialect.params}"
        return function(f"{dialect.inline} {self.register} {self.name}({parameters})", self.lines, self.value)


def element_function(
    name: str, expr: Expr, shape: tuple[int, ...], tensors: Sequence[TracedTensor], prefix: str, dialect: Dialect
) -> ElementFunction:
    """The function that computes `expr`, which has no reductions, at a position of `shape`.

    Args:
        name: What to call it.
        expr: What to compute.
        shape: Where: up to four dimensions, which are the function's last ones.
        tensors: The trace's tensors.
        prefix: Tells the names of its operands from those of others in the same kernel.
        dialect: The language.

    Raises:
        OpRefusal: An operand is too large.
    """
    nowhere = View(shape, (0,) * len(shape))
    each = merge_groups([(dim,) for dim in range(len(shape))])
    operands = Operands.resolve([expr], nowhere, tensors, _POSITIONS, each, prefix=prefix)
    printer = Printer(dialect, operands.names)
    value = printer.value(expr)
    return ElementFunction(name, dialect.register(expr.dtype), tuple(printer.lines), value, operands)


_MAX_READS = 8  # of what is computed, so that there is room for what the kernel binds beside it


def loads_element(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is computed element by element, and that of a problem whose kernels call ``element``."""
    if not isinstance(group.problem, Scan | Sort) or not isinstance(operand, Computed):
        return False
    return not operand.is_of_rows and len(operand.reads()) <= _MAX_READS


def element_prologue(operand: Operand, lowering: Lowering, dialect: Dialect) -> Prologue:
    """A function ``element`` that gives an operand's element, from memory or computed by an elementwise expression.

    Args:
        operand: The operand.
        lowering: Where the trace's tensors are.
        dialect: The language.

    Raises:
        OpRefusal: What it reads is too large.
    """
    made = element_function("element", operand.element, operand.shape, lowering.tensors, "s", dialect)
    return Prologue(
        (made.operands,),
        macros=pointer_macros("SOURCE", made.operands, dialect),
        text=made.text(pointer_parameters(made.operands, dialect), dialect),
        flops=flops_of([operand.element], prod(operand.shape)),
    )
