"""A tensor as a kernel reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from npu_compiler.artifact.plan import Argument
from npu_compiler.dtypes import DType
from npu_compiler.tensor.expr import Expr, Load, Ref
from npu_compiler.tensor.trace import TracedTensor
from npu_compiler.tensor.view import View

__all__ = ["Operand", "are_chunks", "named_strides"]


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads through a view; `forms` has other ways to get at its elements.

    Attributes:
        tensor: The tensor.
        ref: The view, and how it came about.
    """

    tensor: TracedTensor
    ref: Ref

    @property
    def view(self) -> View:
        return self.ref.view

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.view.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.ref.view.strides

    @property
    def offset(self) -> int:
        """Of the first element, in elements."""
        return self.ref.view.offset

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def number_type(self) -> DType:
        """Data type of the numbers that a problem computes with: that of the tensor, or of what its codes stand for."""
        return self.dtype

    @property
    def element(self) -> Expr:
        """What each of its elements is, over the view's shape."""
        return Load(self.ref, self.dtype)

    @property
    def argument(self) -> Argument:
        return self.argument_at(0)

    def reads(self) -> tuple[int, ...]:
        """Indices of the tensors that it is read from, or made of."""
        return (self.tensor.index,)

    @property
    def is_constant(self) -> bool:
        """Whether no kernel of the plan writes it."""
        return self.tensor.source is None

    @property
    def in_memory(self) -> Operand:
        """The same operand, read from the memory of its tensor."""
        return Operand(self.tensor, self.ref)

    def argument_at(self, further: int) -> Argument:
        """What a kernel binds that begins so many elements behind the first one."""
        return Argument(self.tensor.index, (self.offset + further) * self.dtype.size)

    def across(self, dim: int) -> tuple[int, ...]:
        """Where runs of neighbours along a dimension begin: the offset, and the strides of all other dimensions."""
        return (self.offset, *(stride for other, stride in enumerate(self.strides) if other != dim % len(self.strides)))

    def has_chunks(self, count: int) -> bool:
        """Whether every row is whole chunks of `count` neighbours, each at a multiple of that."""
        return are_chunks(count, self.strides[-1], (*self.across(-1), self.shape[-1]))

    def readable(self, dim: int) -> int:
        """Elements along a dimension that may be read at every position, padding included."""
        whole = self.view == self.tensor.view and self.strides[dim] == 1
        return self.tensor.layout.alloc_shape[dim] if whole else self.shape[dim]

    def named_strides(self, prefix: str, names: Sequence[str]) -> dict[str, int]:
        """Elements from one position to the next along each dimension, by the names of a kernel's parameters."""
        return named_strides(self, prefix, names)


def named_strides(operand: Operand | None, prefix: str, names: Sequence[str]) -> dict[str, int]:
    """As `Operand.named_strides`; zeros for an operand that is absent."""
    strides = (0,) * len(names) if operand is None else operand.strides
    return {f"{prefix}_{name}": stride for name, stride in zip(names, strides, strict=True)}


def are_chunks(count: int, step: int, multiples: Iterable[int]) -> bool:
    """Whether elements lie in chunks of `count` neighbours, each at a multiple of that.

    Args:
        count: Elements of a chunk.
        step: Elements from one to the next along the dimension in question.
        multiples: What must be multiples of a chunk: where runs of neighbours begin, and how long they are.
    """
    return step == 1 and all(number % count == 0 for number in multiples)
