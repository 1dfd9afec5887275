"""What a trace consists of: a list of tensors, each of which may have to be in memory.

A traced tensor is an input or a weight, whose `source` is None; or the result of an `Anchor` (an algorithm of its own:
matmul, convolution, pooling, attention), of a `Map` (an expression at each position, which may reduce over the last
dimension), or of a `Scatter` (another tensor with some elements changed). Views are no tensors: a `Ref` has them.
A `Trace` collects them while the definitions of ops are called with symbolic tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from npu_compiler.dtypes import DType
from npu_compiler.tensor.expr import Expr, Load, Ref, leaves
from npu_compiler.tensor.index_check import IndexCheck
from npu_compiler.tensor.intervals import Interval, interval
from npu_compiler.tensor.layout import Layout
from npu_compiler.tensor.symbolic import Tensor, combined, refuse_codes
from npu_compiler.tensor.view import View

__all__ = ["MAX_HEAD_SIZE", "Anchor", "Beside", "LayoutRule", "Map", "Scatter", "Source", "Trace", "TracedTensor"]

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
    """What the kernel of another tensor stores as well: a number for each of its rows.

    Attributes:
        of: The other tensor, whole.
    """

    of: Ref


Source = Map | Anchor | Scatter | Beside


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor in memory.

    Attributes:
        index: Its place in `Trace.tensors`.
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


class Trace:
    """Collects what tracing makes.

    Attributes:
        tensors: In order of computation.
        checks: The indices that kernels check; `expr.Checked` has a number in this list.
        bounds: Of tensors of integers that are computed, by their index.
        node: Name of the node whose definition is called.
        names: The names that the graph has for the tensors it is called with.
    """

    def __init__(self, layouts: LayoutRule) -> None:
        self.layouts = layouts
        self.tensors: list[TracedTensor] = []
        self.checks: list[IndexCheck] = []
        self.bounds: dict[int, Interval] = {}
        self.node = ""
        self.names: dict[Tensor, str] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: DType, role: str, source: Source | None = None) -> Tensor:
        """Declares a tensor in memory and gives the symbolic tensor that refers to it."""
        return self._declare(name, shape, dtype, role, source, self.layouts.layout(shape, role))

    def _declare(
        self, name: str, shape: tuple[int, ...], dtype: DType, role: str, source: Source | None, layout: Layout
    ) -> Tensor:
        traced = TracedTensor(len(self.tensors), name, shape, dtype.stored, layout, role, source)
        self.tensors.append(traced)
        bounds = interval(source.expr, self.bounds) if isinstance(source, Map) and not dtype.is_float else None
        if bounds is not None:
            self.bounds[traced.index] = bounds
        return Tensor(self, shape, dtype, Ref(traced.index, traced.view))

    def check(self, index: Tensor, extent: int, wraps: bool) -> int:
        """The number of a check of `index`, see `IndexCheck`."""
        name = self.names.get(index, self.node)
        self.checks.append(IndexCheck(name, index.shape, self.node, extent, wraps))
        return len(self.checks) - 1

    def map(self, tensor: Tensor, role: str | None = None, order: tuple[int, ...] = ()) -> Tensor:
        """Stores an expression, or a copy of a view. Images stay images unless `role` says otherwise.

        Args:
            tensor: What to store.
            role: See `LayoutRule`.
            order: Where given: the dimensions from outermost to innermost, as they lie on every target.
        """
        if order:
            layout = Layout(tensor.shape, tensor.shape, order)
            return self._declare(self.node, tensor.shape, tensor.dtype, "plain", Map(tensor.expr), layout)
        return self.add(self.node, tensor.shape, tensor.dtype, role or self._role(tensor), Map(tensor.expr))

    def anchor(
        self,
        kind: str,
        operands: tuple[Tensor, ...],
        shape: tuple[int, ...],
        dtype: DType,
        role: str = "plain",
        **attrs: Any,
    ) -> Tensor:
        """Adds an anchor whose operands are brought into memory first.

        Args:
            kind: What it computes: the `kind` of a problem.
            operands: What it reads.
            shape, dtype: Of the result.
            role: That of the result; see `LayoutRule`.
            attrs: Its parameters, for the problem.
        """
        refs = []
        for operand in operands:
            refuse_codes(operand)
            ref = operand.realize().ref
            assert ref is not None
            refs.append(ref)
        source = Anchor(kind, tuple(refs), attrs)
        if kind == "attention":  # [B, H, S, D] as [B, S, H, D], which the projection after it reads as rows
            return self._declare(self.node, shape, dtype, "plain", source, Layout(shape, shape, (0, 2, 1, 3)))
        return self.add(self.node, shape, dtype, role, source)

    def scatter(
        self, into: Tensor, places: Mapping[int, Tensor], values: Tensor, walks: Sequence[int] | None = None
    ) -> Tensor:
        """`into` with `values` at the positions `places`; of several values for one place any one wins.

        Args:
            into: Any shape.
            places: By dimension of `into`, counted from the front: where along it each value goes, integers that
                broadcast to the shape of `values` and are checked, see `Tensor.within`; -1 stands for nowhere.
            values: Any shape.
            walks: For each dimension of `values` the dimension of `into` that it walks from 0 on, or -1; when omitted,
                the one of the same number where `places` has it not.
        """
        base = into.realize().ref
        assert base is not None
        if not base.view.same_elements(self.tensors[base.tensor].view):
            base = self.map(into).ref
            assert base is not None
        role = self.tensors[base.tensor].role
        strides = self.layouts.layout(into.shape, role).strides
        if walks is None:
            walks = [-1 if dim in places else dim for dim in range(len(into.shape))]
        view = View(values.shape, tuple(0 if dim < 0 else strides[dim] for dim in walks))
        index, stride = combined({dim: strides[dim] for dim in places}, places, nowhere=True)
        source = Scatter(base, values.cast(into.dtype).expr, values.shape, view, index.expr, stride)
        return self.add(self.node, into.shape, into.dtype, role, source)

    def _role(self, tensor: Tensor) -> str:
        """An elementwise result is an image where it has the dimensions of one that it is made of, or of parts of one.

        So it is where what it is made of lies as images do, with the channels of a pixel side by side.
        """
        rank = len(tensor.shape)
        for load in leaves(tensor.expr) if rank > 2 else ():
            source, view = self.tensors[load.ref.tensor], load.ref.view
            if view.shape != tensor.shape:
                continue
            parts = all(step == "slice" for step, _ in load.ref.steps)
            if source.role == "image" and len(source.shape) == rank and parts:
                return "image"
            pixels = [stride for dim, stride in enumerate(view.strides) if dim != 1 and view.shape[dim] > 1]
            if view.shape[1] > 1 and view.strides[1] == 1 and pixels and min(pixels) >= view.shape[1]:
                return "image"
        return "plain"
