"""How ops treat rows: positions along one dimension. A definition names its rule beside its arithmetic.

A `RowRule` tells what an op must read to give some positions of its result: the dimension of each operand along which
the same positions are enough, or nothing where the wanted rows depend on others. A `SelectionRule` is that of an op
which takes rows of its operand, and tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_compiler.ir import OpNode, TensorSpec

__all__ = ["MALFORMED", "Passage", "RowCall", "RowRule", "Rows", "Selection", "SelectionRule", "Turn"]
__all__ += ["apart_from_dim", "broadcasting", "of_known_rows", "turned"]

Shape = tuple[int, ...]

MALFORMED = (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, OverflowError)
"""What attributes raise that an op's definition refuses: such a node stays as it is, for the definition to say why."""


@dataclass(frozen=True)
class Rows:
    """Positions along a dimension.

    Attributes:
        count: How many.
        size: Of how many.
        known: The positions, where they are known when compiling.
        index: Else the name of the tensor [count] that holds them, integers.
        wraps: Whether negative ones of these count from the end.
    """

    count: int
    size: int
    known: range | None = None
    index: str = ""
    wraps: bool = False


@dataclass(frozen=True)
class Selection:
    """Some rows of a tensor.

    Attributes:
        source: The tensor.
        dim: The dimension along which they are taken, counted from the front.
        rows: Which they are.
    """

    source: str
    dim: int
    rows: Rows


@dataclass(frozen=True)
class Passage:
    """How a node gives some positions of a dimension of its result.

    Attributes:
        dims: By parameter, the dimension of which the same positions are read; other operands are read as they are.
        attrs: Attributes that change.
        op: The op that gives them, where it is another one; it reads `self` alone.
        item: Of a list of tensors, the only one that is read.
    """

    dims: Mapping[str, int]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    op: str | None = None
    item: int | None = None


@dataclass(frozen=True)
class RowCall:
    """A node of which positions of dimension `dim` of its results are wanted, with the shapes that its rule looks at.

    Attributes:
        node: It reads something and makes something.
        tensors: Those that it reads and makes, whole.
        dim: Counted from the front.
        rows: Fewer than all.
    """

    node: OpNode
    tensors: Mapping[str, TensorSpec]
    dim: int
    rows: Rows

    @property
    def output(self) -> Shape:
        return self.tensors[self.node.outputs[0]].shape

    @property
    def rank(self) -> int:
        return len(self.output)

    def shape(self, parameter: str) -> Shape:
        value = self.node.inputs[parameter]
        return self.tensors[value if isinstance(value, str) else value[0]].shape

    def broadcast(self, parameter: str) -> dict[str, int]:
        """The dimension of an operand that broadcasts to the result; none where it has one position for all."""
        own = self.shape(parameter)
        dim = self.dim - (self.rank - len(own))
        return {parameter: dim} if dim >= 0 and own[dim] != 1 else {}

    def along(self, key: str = "dim", default: int = 0, rank: int | None = None) -> int:
        """An attribute that names a dimension, counted from the front."""
        return int(self.node.attrs.get(key, default)) % max(self.rank if rank is None else rank, 1)

    def resized(self) -> list[int]:
        """The shape of the result with only the wanted positions."""
        return [*self.output[: self.dim], self.rows.count, *self.output[self.dim + 1 :]]


RowRule = Callable[[RowCall], Passage | None]
SelectionRule = Callable[[OpNode, Mapping[str, TensorSpec]], Selection | None]
Turn = Callable[[Mapping[str, Any], int], Sequence[int]]
"""By an op's attributes and the rank: for each dimension of the result the operand's dimension that it is."""


def broadcasting(call: RowCall) -> Passage:
    """For elementwise ops: the same rows of every operand, but for one that has a single row, which is broadcast."""
    dims: dict[str, int] = {}
    for parameter in call.node.inputs:
        dims |= call.broadcast(parameter)
    return Passage(dims)


def apart_from_dim(call: RowCall) -> Passage | None:
    """For ops that work along `dim`: the same rows of `self` along any other dimension; along `dim` all are needed."""
    return None if call.along() == call.dim else Passage({"self": call.dim})


def turned(turn: Turn) -> RowRule:
    """For ops that reorder dimensions: the same rows of `self`, along the dimension that the wanted one was before."""
    return lambda call: Passage({"self": turn(call.node.attrs, call.rank)[call.dim]})


def of_known_rows(positions: Callable[[Mapping[str, Any], int], range]) -> SelectionRule:
    """The rule of an op that takes positions of the dimension `dim` of `self` which its attributes name.

    Args:
        positions: Gives them by the attributes and the dimension's size; some may lie outside of it.
    """

    def rule(node: OpNode, tensors: Mapping[str, TensorSpec]) -> Selection | None:
        source = str(node.inputs["self"])
        shape, dim = tensors[source].shape, int(node.attrs.get("dim", 0))
        if not -len(shape) <= dim < len(shape) or node.attrs.get("step", 1) < 1:
            return None
        size = shape[dim]
        taken = positions(node.attrs, size)
        inside = all(0 <= position < size for position in (taken[0], taken[-1])) if taken else False
        return Selection(source, dim % len(shape), Rows(len(taken), size, taken)) if inside else None

    return rule
