"""What every problem says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

from npu_compiler.artifact.plan import Argument
from npu_compiler.lowering.operands import check_size
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.records import changed
from npu_compiler.tensor.trace import Anchor, TracedTensor

__all__ = ["Added", "Dims", "Paired", "Problem"]

Dims = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""The dimensions of a result that kernels count as their batch, their rows and their columns; these are one."""


@dataclass(frozen=True)
class Problem(ABC):
    """A computation with an algorithm of its own, as every target sees it before it divides the work.

    Attributes:
        kind: What the trace calls it: that of the anchors that pose it.
        takes_epilogue: Whether what follows it may be computed where its results are; else they go to memory as they
            are.
        operand_names: The fields that are operands, in the order of the op's arguments; None is in one that is absent.
        result: The tensor that it computes, ahead of any epilogue.
    """

    kind: ClassVar[str]
    takes_epilogue: ClassVar[bool] = True
    operand_names: ClassVar[tuple[str, ...]] = ()
    result: TracedTensor

    @classmethod
    def of(cls, result: TracedTensor, anchor: Anchor, operands: Sequence[Operand]) -> Self:
        """The problem that an anchor poses: unless a kind says otherwise, operands and parameters go by their names.

        Args:
            result: The anchor's tensor.
            anchor: What the op's definition asked for.
            operands: What it reads, in the op's order.
        """
        given: dict[str, Any] = {**dict(zip(cls.operand_names, operands, strict=False)), **anchor.attrs}
        return cls(result, **given)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return self.result.shape

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """What it reads, in the order of the op's arguments."""
        return tuple([getattr(self, name) for name in self._given])

    @property
    def _given(self) -> list[str]:
        """Names of the operands that there are."""
        return [name for name in self.operand_names if getattr(self, name) is not None]

    @property
    def arguments(self) -> dict[str, Argument]:
        """The operands in memory as kernels bind them that know them by the same names."""
        return {name: operand.argument for name, operand in zip(self._given, self.operands, strict=True)}

    def with_operand(self, position: int, operand: Operand) -> Self:
        """The same problem with one of its operands in another form."""
        return changed(self, **{self._given[position]: operand})

    def stored(self) -> Self:
        """The same problem with all operands in memory."""
        problem = self
        for position, operand in enumerate(self.operands):
            problem = problem.with_operand(position, operand.in_memory)
        return problem

    @property
    def is_stored(self) -> bool:
        """Whether all operands are read from memory, as they lie there."""
        return all(type(operand) is Operand for operand in self.operands)

    def reads(self) -> tuple[int, ...]:
        """Indices of the tensors that its operands are read from, or made of."""
        return tuple(index for operand in self.operands for index in operand.reads())

    @property
    @abstractmethod
    def dims(self) -> Dims:
        """How kernels count the result's positions."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Its arithmetic: multiplications and additions."""

    def check(self) -> None:
        """Refuses what no kernel computes.

        Raises:
            OpRefusal: A tensor has more elements than kernels can count, or a size is out of their range.
        """
        for operand in self.operands:
            check_size(operand.tensor)


@dataclass(frozen=True)
class Added(Operand):
    """What is added to a problem's own result: that of another problem of the same shape, epilogue left aside.

    Attributes:
        problem: The other problem.
    """

    problem: Problem

    def reads(self) -> tuple[int, ...]:
        return self.problem.reads()


@dataclass(frozen=True)
class Paired(Operand):
    """A product's own result as its epilogue takes it: two neighbouring columns, which become one."""
