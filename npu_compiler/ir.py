"""The graph the compiler works on: frozen, in static single assignment, verified after every pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from npu_compiler.artifact.output_structure import Structure
from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.dtypes import DType
from npu_compiler.errors import IRError

__all__ = ["IRGraph", "OpNode", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the model: its name in the IR, logical shape and data type."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


class _Reader:
    __slots__ = ("read",)

    read: tuple[str, ...]
    """What `OpNode.tensors` gave, once it was asked: each pass asks."""


@dataclass(frozen=True, slots=True)
class OpNode(_Reader):
    """One ATen operation.

    Attributes:
        name: Unique name of the node.
        op: ATen name with overload, such as ``aten.add.Tensor``.
        inputs: Tensor arguments by ATen parameter name; a list of tensors is a tuple of names.
        attrs: All other arguments, by ATen parameter name.
        outputs: Names of the tensors it makes.
    """

    name: str
    op: str
    inputs: Mapping[str, str | tuple[str, ...]]
    attrs: Mapping[str, Any]
    outputs: tuple[str, ...]

    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors the node reads, in order of its parameters."""
        try:
            return self.read
        except AttributeError:
            values = [(value,) if isinstance(value, str) else value for value in self.inputs.values()]
            object.__setattr__(self, "read", tuple(chain.from_iterable(values)))
            return self.read

    def renamed(self, names: Mapping[str, str]) -> OpNode:
        """The same node reading `names[t]` wherever it reads a tensor `t` of `names`."""
        if names.keys().isdisjoint(self.tensors()):
            return self
        inputs = {
            key: names.get(value, value) if isinstance(value, str) else tuple(names.get(v, v) for v in value)
            for key, value in self.inputs.items()
        }
        return OpNode(self.name, self.op, inputs, self.attrs, self.outputs)


@dataclass(frozen=True)
class IRGraph:
    """A model as a list of nodes in order of execution.

    Attributes:
        name: The model's name.
        inputs, outputs: Names of the tensors the caller gives and gets, in order.
        weights: Names of parameters, buffers and constants, and the recipe of each: what it is made from.
        nodes: Every node after the producers of what it reads.
        tensors: Every tensor by name.
        compute_dtype: Half precision that the graph is already written for; None where the compiler chooses one.
        notes: What was assumed where the IR does not say it.
        structure: How the model nests its outputs; None for the usual way.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, WeightRecipe]
    nodes: tuple[OpNode, ...]
    tensors: Mapping[str, TensorSpec]
    compute_dtype: DType | None = None
    notes: tuple[str, ...] = ()
    structure: Structure | None = None

    @cached_property
    def nodes_by_op(self) -> Mapping[str, list[tuple[int, OpNode]]]:
        """The nodes of each op, with their places among all."""
        nodes: dict[str, list[tuple[int, OpNode]]] = {}
        for place, node in enumerate(self.nodes):
            nodes.setdefault(node.op, []).append((place, node))
        return nodes

    def users(self) -> dict[str, list[OpNode]]:
        """The nodes that read each tensor, in order; a tensor that nobody reads has no entry."""
        users: dict[str, list[OpNode]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.tensors()):
                users.setdefault(name, []).append(node)
        return users

    def producers(self) -> dict[str, OpNode]:
        """The node that makes each tensor; inputs and weights have no entry."""
        return {output: node for node in self.nodes for output in node.outputs}

    def verify(self) -> IRGraph:
        """Checks single assignment, order and declarations, and returns the graph itself.

        Raises:
            IRError: A tensor is undeclared, made twice, or read before it is made.
        """
        known = {*self.inputs, *self.weights}
        for name in known:
            if name not in self.tensors:
                raise IRError(f"graph '{self.name}': tensor '{name}' has no shape and dtype; extract the model again")
        for node in self.nodes:
            if not known.issuperset(node.tensors()):
                name = next(name for name in node.tensors() if name not in known)
                raise IRError(
                    f"node '{node.name}' ({node.op}) reads the tensor '{name}', which no input, weight or earlier "
                    "node makes; the IR is damaged or out of order, extract the model again"
                )
            for name in node.outputs:
                if name in known or name not in self.tensors:
                    why = "is made twice" if name in known else "has no shape and dtype"
                    raise IRError(f"node '{node.name}' ({node.op}): its output '{name}' {why}; extract the model again")
                known.add(name)
        for name in self.outputs:
            if name not in known:
                raise IRError(f"graph '{self.name}': its output '{name}' is made by no node; extract the model again")
        return self
