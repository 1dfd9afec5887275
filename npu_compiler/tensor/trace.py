"""What a trace consists of: a list of tensors, each of which may have to be in memory.

A traced tensor is an input or a weight, whose `source` is None; or the result of an `Anchor` (an algorithm of its own:
matmul, convolution, pooling, attention), of a `Map` (an expression at each position, which may reduce over the last
dimension), or of a `Scatter` (another tensor with some elements changed). Views are no tensors: a `Ref` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from npu_compiler.dtypes import DType
from npu_compiler.tensor.expr import Expr, Load, Ref, leaves
from npu_compiler.tensor.layout import Layout
from npu_compiler.tensor.view import View

__all__ = ["MAX_HEAD_SIZE", "Anchor", "Beside", "LayoutRule", "Map", "Scatter", "Source", "TracedTensor"]
__all__ += ["role_of", "users_of"]

MAX_HEAD_SIZE = 256
"""Of the heads of an attention that is one anchor; of larger ones products and softmax are written out."""


class LayoutRule(Protocol):
    """How a target lays out a tensor: `role` is ``plain``, ``image`` [N, C, ...] or ``conv_weight`` [O, I, ...]."""

    def layout(self, shape: tuple[int, ...], role: str) -> Layout: ...


@dataclass(frozen=True, slots=True)
class Map:
    """An expression evaluated at every position of its tensor's shape."""

    expr: Expr


@dataclass(frozen=True, slots=True)
class Anchor:
    """A computation with an algorithm of its own.

    Attributes:
        kind: What the problem that it becomes (`lowering.problems`) goes by, such as ``matmul``.
        operands: What it reads.
        attrs: Its parameters.
    """

    kind: str
    operands: tuple[Ref, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scatter:
    """A tensor that equals another one but for the positions that an index names.

    Attributes:
        into: The other tensor, whole.
        expr: The new values, over `shape`.
        shape: Shape of the new values.
        view: For each position of `shape`, the place of its value in the tensor's buffer but for what the index says.
        index: Over `shape`: the value goes `index * index_stride` elements behind its place in `view`; nowhere where
            the index is negative.
        index_stride: Elements from one number of the index to the next.
    """

    into: Ref
    expr: Expr
    shape: tuple[int, ...]
    view: View
    index: Expr
    index_stride: int


@dataclass(frozen=True, slots=True)
class Beside:
    """What the kernel of another tensor stores as well: numbers for each of its rows.

    Attributes:
        of: The other tensor, whole.
    """

    of: Ref


Source = Map | Anchor | Scatter | Beside


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor in memory.

    Attributes:
        index: Its place in `symbolic.Trace.tensors`.
        name: Name in the IR, or of the node it is a part of.
        role: Role its layout was chosen for.
        source: What computes it; None for inputs and weights.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: DType
    layout: Layout
    role: str
    source: Source | None

    def operands(self) -> Iterator[Ref]:
        """The references to other tensors that computing this one reads."""
        if isinstance(self.source, Anchor):
            yield from self.source.operands
        elif isinstance(self.source, Map):
            yield from (load.ref for load in leaves(self.source.expr))
        elif isinstance(self.source, Scatter):
            yield self.source.into
            yield from (load.ref for expr in (self.source.expr, self.source.index) for load in leaves(expr))
        elif isinstance(self.source, Beside):
            yield self.source.of

    @property
    def view(self) -> View:
        return self.layout.place

    @property
    def ref(self) -> Ref:
        """The tensor as it lies."""
        return Ref(self.index, self.view)

    @property
    def load(self) -> Load:
        """Each of its elements."""
        return Load(self.ref, self.dtype)


def users_of(tensors: Iterable[TracedTensor]) -> dict[int, set[int]]:
    """By the index of each tensor that others read, the indices of these."""
    users: dict[int, set[int]] = {}
    for tensor in tensors:
        for ref in tensor.operands():
            users.setdefault(ref.tensor, set()).add(tensor.index)
    return users


def role_of(expr: Expr, shape: tuple[int, ...], tensors: Sequence[TracedTensor]) -> str:
    """The role of an elementwise result: it is an image where it has the dimensions of one that it is made of, or of
    parts of one.

    So it is where what it is made of lies as images do, with the channels of a pixel side by side.
    """
    for load in leaves(expr) if len(shape) > 2 else ():
        source, view = tensors[load.ref.tensor], load.ref.view
        if view.shape != shape:
            continue
        parts = all(step == "slice" for step, _ in load.ref.steps)
        if source.role == "image" and len(source.shape) == len(shape) and parts:
            return "image"
        pixels = [stride for dim, stride in enumerate(view.strides) if dim != 1 and view.shape[dim] > 1]
        if view.shape[1] > 1 and view.strides[1] == 1 and pixels and min(pixels) >= view.shape[1]:
            return "image"
    return "plain"
