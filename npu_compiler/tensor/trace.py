"""What a trace consists of: a list of tensors, each of which may have to be in memory.

A traced tensor is an input or a weight, whose `source` is None; or the result of an `Anchor` (an algorithm of its own:
matmul, convolution, pooling, attention), of a `Map` (an expression at each position, which may reduce over the last
dimension), or of a `Scatter` (another tensor with some elements changed). Views are no tensors: a `Ref` has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from npu_compiler.dtypes import DType
from npu_compiler.tensor.expr import Expr, Ref, leaves
from npu_compiler.tensor.layout import Layout
from npu_compiler.tensor.view import View

__all__ = ["MAX_HEAD_SIZE", "Anchor", "LayoutRule", "Map", "Scatter", "Source", "TracedTensor"]


MAX_HEAD_SIZE = 256
"""Of the queries, keys and values of attention that is an anchor: kernels keep a tile of them at hand."""


class LayoutRule(Protocol):
    """How a target lays out a tensor: `role` is ``plain``, ``image`` [N, C, H, W] or ``conv_weight`` [O, I, H, W]."""

    def layout(self, shape: tuple[int, ...], role: str) -> Layout: ...


@dataclass(frozen=True, slots=True)
class Map:
    """An expression evaluated at every position of its tensor's shape."""

    expr: Expr


@dataclass(frozen=True, slots=True)
class Anchor:
    """A computation with an algorithm of its own.

    Attributes:
        kind: ``matmul``, ``conv2d``, ``pool2d`` or ``attention``.
        operands: What it reads.
        attrs: Its parameters.
    """

    kind: str
    operands: tuple[Ref, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scatter:
    """A tensor that equals another one but for the positions that an index names along one dimension.

    Attributes:
        into: The other tensor, whole.
        expr: The new values, over `shape`.
        shape: Shape of the new values.
        dim: The dimension.
        index: Where along `dim` each value goes, over `shape`.
    """

    into: Ref
    expr: Expr
    shape: tuple[int, ...]
    dim: int
    index: Expr


Source = Map | Anchor | Scatter


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

    @property
    def view(self) -> View:
        return View(self.shape, self.layout.strides)
