"""Device functions that compute one element of an operand from its position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cuda_compiler.dialect import CUDA
from npu_compiler.lowering.anchors import function
from npu_compiler.lowering.dialect import Printer
from npu_compiler.lowering.operands import Operands, merge_groups
from npu_compiler.tensor.expr import Expr
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import View

__all__ = ["ElementFunction", "element_function"]

_POSITIONS = ("batch", "head", "row", "col")


@dataclass(frozen=True)
class ElementFunction:
    """A device function of a position in four dimensions.

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

    def text(self, parameters: str) -> str:
        """The function, taking all of `parameters`."""
        positions = ", ".join(f"int {name}" for name in _POSITIONS)
        head = f"__device__ __forceinline__ {self.register} {self.name}({positions}, {parameters}const Params& p)"
        return function(head, self.lines, self.value)


def element_function(
    name: str, expr: Expr, shape: tuple[int, ...], tensors: Sequence[TracedTensor], prefix: str
) -> ElementFunction:
    """The function that computes `expr`, which has no reductions, at a position of `shape`, four dimensions.

    Args:
        name: What to call it.
        expr: What to compute.
        shape: Where.
        tensors: The trace's tensors.
        prefix: Tells the names of its operands from those of others in the same kernel.

    Raises:
        OpRefusal: An operand is too large.
    """
    nowhere = View(shape, (0,) * len(shape))
    each = merge_groups([(dim,) for dim in range(len(shape))])
    operands = Operands.resolve([expr], nowhere, tensors, _POSITIONS, each, prefix=prefix)
    printer = Printer(CUDA, operands.names)
    value = printer.value(expr)
    return ElementFunction(name, CUDA.register(expr.dtype), tuple(printer.lines), value, operands)
