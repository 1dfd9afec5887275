"""The forms in which a problem gets an element of an operand, beside reading it from memory."""

from __future__ import annotations

from dataclasses import dataclass

from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.problem import Problem
from npu_compiler.tensor.expr import Expr, has_reduce, leaves

__all__ = ["Added", "Computed", "Scattered"]


@dataclass(frozen=True)
class Computed(Operand):
    """An operand that is computed where it is read, from other tensors.

    Attributes:
        expr: Its elements, over the view's shape; a load with an index gathers.
        made: What would store the tensor, for launches that read it from memory all the same.
    """

    expr: Expr
    made: Group

    @property
    def is_of_rows(self) -> bool:
        """Whether an element needs its row first, as that of a norm does; else it is elementwise."""
        return has_reduce(self.expr)

    def reads(self) -> tuple[int, ...]:
        return tuple(load.ref.tensor for load in leaves(self.expr))


@dataclass(frozen=True)
class Scattered(Operand):
    """An operand some of whose elements are new: they are stored to its memory by the launch that reads it.

    Attributes:
        made: What they are and where they go, elementwise.
    """

    made: Group

    def reads(self) -> tuple[int, ...]:
        return self.made.reads()


@dataclass(frozen=True)
class Added(Operand):
    """What is added to a problem's own result: that of another problem of the same shape, epilogue left aside.

    Attributes:
        problem: The other problem.
    """

    problem: Problem

    def reads(self) -> tuple[int, ...]:
        return self.problem.reads()
