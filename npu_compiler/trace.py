"""Tracing: every node's definition is called once, and what remains is a list of loops, matmuls and convolutions.

A traced tensor is either a source (an input or a weight), the result of an `Anchor` (a computation with an algorithm
of its own: matmul, convolution, pooling) or of a `Map` (an expression evaluated at each position, which may reduce over
the last dimension). Views leave no trace: they live in the references.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from npu_compiler.dtypes import DType
from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.expr import Expr, Ref, leaves
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.layout import Layout
from npu_compiler.ops.registry import Kind, definition
from npu_compiler.symbolic import OpRefusal, Tensor
from npu_compiler.view import View

__all__ = ["Anchor", "LayoutRule", "Map", "Scatter", "Trace", "TracedTensor", "trace_graph"]


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
        """The references that computing this tensor reads."""
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


class Trace:
    """Collects the tensors that tracing makes. `tensors` is in order of computation."""

    def __init__(self, layouts: LayoutRule) -> None:
        self.layouts = layouts
        self.tensors: list[TracedTensor] = []
        self.node = ""

    def add(self, name: str, shape: tuple[int, ...], dtype: DType, role: str, source: Source | None = None) -> Tensor:
        """Declares a tensor in memory and gives the symbolic tensor that refers to it."""
        return self._declare(name, shape, dtype, role, source, self.layouts.layout(shape, role))

    def _declare(
        self, name: str, shape: tuple[int, ...], dtype: DType, role: str, source: Source | None, layout: Layout
    ) -> Tensor:
        traced = TracedTensor(len(self.tensors), name, shape, dtype, layout, role, source)
        self.tensors.append(traced)
        return Tensor(self, shape, dtype, Ref(traced.index, traced.view))

    def map(self, tensor: Tensor, role: str | None = None) -> Tensor:
        """Stores an expression, or a copy of a view. Images stay images unless `role` says otherwise."""
        return self.add(self.node, tensor.shape, tensor.dtype, role or self._role(tensor), Map(tensor.expr))

    def anchor(
        self, kind: str, operands: tuple[Tensor, ...], shape: tuple[int, ...], dtype: DType, **attrs: Any
    ) -> Tensor:
        """Adds an anchor whose operands are brought into memory first."""
        refs = []
        for operand in operands:
            ref = operand.realize().ref
            assert ref is not None
            refs.append(ref)
        source = Anchor(kind, tuple(refs), attrs)
        if kind == "attention":  # [B, H, S, D] as [B, S, H, D], which the projection after it reads as rows
            return self._declare(self.node, shape, dtype, "plain", source, Layout(shape, shape, (0, 2, 1, 3)))
        return self.add(self.node, shape, dtype, "plain" if kind == "matmul" else "image", source)

    def scatter(self, into: Tensor, dim: int, index: Tensor, values: Tensor) -> Tensor:
        """`into` with `values` at the positions `index` of dimension `dim`.

        Args:
            into: Any shape.
            dim: Counted from the front.
            index: [n], integers from 0.
            values: The shape of `into`, but for n in place of its size along `dim`.
        """
        base = into.realize().ref
        assert base is not None
        if not base.view.same_elements(self.tensors[base.tensor].view):
            base = self.map(into).ref
            assert base is not None
        along = index.reshape((-1, *(1,) * (len(values.shape) - dim - 1)))
        source = Scatter(base, values.cast(into.dtype).expr, values.shape, dim, along.expr)
        return self.add(self.node, into.shape, into.dtype, self.tensors[base.tensor].role, source)

    def _role(self, tensor: Tensor) -> str:
        """An elementwise result of an image of the same shape is an image."""
        if len(tensor.shape) == 4:
            for load in leaves(tensor.expr):
                source = self.tensors[load.ref.tensor]
                if source.role == "image" and source.shape == tensor.shape and not load.ref.steps:
                    return "image"
        return "plain"


def trace_graph(graph: IRGraph, layouts: LayoutRule) -> tuple[Trace, dict[str, Tensor]]:
    """Traces a whole graph.

    Returns:
        The trace, and the symbolic tensor of every input, weight and node output by name.

    Raises:
        UnsupportedOpError: A definition refuses its arguments.
        IRError: A node's result differs from what the IR declares.
    """
    trace = Trace(layouts)
    env: dict[str, Tensor] = {}
    roles = _source_roles(graph)
    for name in (*graph.inputs, *graph.weights):
        spec = graph.tensors[name]
        env[name] = trace.add(name, spec.shape, spec.dtype, roles.get(name, "plain"))
    for node in graph.nodes:
        trace.node = node.name
        for name, result in zip(node.outputs, call(node, env, trace), strict=True):
            spec = graph.tensors[name]
            if result.shape != spec.shape or result.dtype.category != spec.dtype.category:
                raise IRError(
                    f"node '{node.name}' ({node.op}): the IR declares '{spec}', its definition gives "
                    f"{result.dtype}{list(result.shape)}; extract the model again"
                )
            env[name] = _as_declared(result, spec.dtype, trace)
    return trace, env


def _as_declared(result: Tensor, dtype: DType, trace: Trace) -> Tensor:
    """The result stored in the data type that the graph declares, unless it is a mere view."""
    if result.dtype != dtype:
        result = result.cast(dtype)
    return result.realize()


def call(node: OpNode, env: Mapping[str, Tensor], trace: Trace) -> tuple[Tensor, ...]:
    """Calls the definition of a node's op.

    Raises:
        UnsupportedOpError: The definition refuses these arguments.
    """
    entry = definition(node.op)
    if entry is None:
        raise UnsupportedOpError(node.name, node.op, "no definition of this op is registered")
    arguments: dict[str, Any] = dict(node.attrs)
    for key, value in node.inputs.items():
        arguments[key] = env[value] if isinstance(value, str) else tuple(env[v] for v in value)
    for parameter in entry.parameters:
        if parameter.kind is Kind.ATTRIBUTE and arguments.get(parameter.name, 0) is None and not parameter.is_required:
            arguments.pop(parameter.name)
    try:
        result = entry.function(trace, **arguments) if entry.creates else entry.function(**arguments)
    except OpRefusal as refusal:
        raise UnsupportedOpError(node.name, node.op, str(refusal)) from None
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise UnsupportedOpError(
            node.name, node.op, f"its attributes have unexpected types or values ({error})"
        ) from error
    results = result if isinstance(result, tuple) else (result,)
    if len(results) < len(node.outputs):
        raise UnsupportedOpError(
            node.name, node.op, f"{len(node.outputs)} outputs are used, {len(results)} are supported"
        )
    return results[: len(node.outputs)]


_IMAGE_OPS = ("aten.conv2d", "aten.max_pool2d", "aten.avg_pool2d", "aten.adaptive_avg_pool2d", "aten.batch_norm")


def _source_roles(graph: IRGraph) -> dict[str, str]:
    """Roles of the graph's inputs and weights: images where a convolution, a pooling or a BatchNorm reads them.

    An image is also what becomes one through elementwise ops, so that the layout does not change on the way.
    """
    roles: dict[str, str] = {}
    for node in reversed(graph.nodes):
        if node.op.startswith(_IMAGE_OPS):
            for key, value in node.inputs.items():
                if not isinstance(value, str) or len(graph.tensors[value].shape) != 4:
                    continue
                if key in ("input", "self"):
                    roles[value] = "image"
                elif key == "weight" and node.op.startswith("aten.conv2d"):
                    roles[value] = "conv_weight"
            continue
        output = graph.tensors[node.outputs[0]] if node.outputs else None
        if output is not None and roles.get(output.name) == "image":
            for name in node.tensors():
                if graph.tensors[name].shape == output.shape:
                    roles.setdefault(name, "image")
    return roles
