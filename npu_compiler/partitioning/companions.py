"""Nodes that no input reaches: they go where they are read, into every partition, and make none of their own.

A partition on the device is compiled, and what of them would need a kernel becomes a constant or a weight there; one on
the CPU has them as they are. So nothing that an index or a mask is computed from ever crosses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from npu_compiler.artifact.recipes import WeightRecipe
from npu_compiler.errors import IRError, UnsupportedOpError
from npu_compiler.graph.constants import constant_nodes, find_folds
from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.registry import bind, traits_of
from npu_compiler.partitioning.placement import SupportRule
from npu_compiler.tensor.layout import BufferSpec, dense

__all__ = ["Companions", "find_companions"]


@dataclass(frozen=True)
class Companions:
    """What goes along.

    Attributes:
        graph: The graph without these nodes; what others read of their results are weights in it.
        nodes: The nodes, in order.
        folded: Names of those that a compiler folds.
    """

    graph: IRGraph
    nodes: Sequence[OpNode]
    folded: frozenset[str] = frozenset()

    def of(self, readers: Iterable[OpNode]) -> list[OpNode]:
        """The nodes that some others need, in order."""
        read = {name for node in readers for name in node.tensors()}
        needed = []
        for node in reversed(self.nodes):
            if not read.isdisjoint(node.outputs):
                needed.append(node)
                read.update(node.tensors())
        return needed[::-1]

    def device_tensors(self, whole: IRGraph, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The tensors in the data types of the device, but for those on the way to what is folded.

        These are computed once, in the data types that the model declares: an index that is computed from numbers with
        a point stays the same. What goes along and is not folded runs as the rest does.

        Args:
            whole: The graph with these nodes.
            tensors: All tensors in the data types of the device.
        """
        folded = [node for node in self.nodes if node.name in self.folded]
        running = [node for node in (*self.nodes, *self.graph.nodes) if node.name not in self.folded]
        read_within = {name for node in folded for name in node.tensors()}
        made = {name for node in folded for name in node.outputs}
        outside = {name for node in running for name in node.tensors()}
        exact = {name for name in made | read_within if name not in outside or (name in made and name in read_within)}
        return {name: whole.tensors[name] if name in exact else spec for name, spec in tensors.items()}


def find_companions(graph: IRGraph, support: SupportRule, folds_need_support: bool) -> Companions:
    """Finds the nodes that go along with others.

    Args:
        graph: The model, in which nothing changes in place.
        support: Whether a node lowers.
        folds_need_support: Whether also what a compiler would fold has to be supported, as where the caller decides.
    """
    constant = constant_nodes(graph)
    folded = {name for fold in find_folds(graph, _bound) for name in fold.nodes}
    outputs, available = set(graph.outputs), set(graph.weights)
    along: dict[str, OpNode] = {}
    for node in graph.nodes:
        if node.name in constant and outputs.isdisjoint(node.outputs) and all(t in available for t in node.tensors()):
            free = traits_of(node.op, node.attrs).is_silent or (node.name in folded and not folds_need_support)
            if free or support(node):
                along[node.name] = node
                available.update(node.outputs)
    rest = [node for node in graph.nodes if node.name not in along]
    needed = Companions(graph, list(along.values())).of(rest)
    others = tuple(rest)  # what goes along with nobody is read by nobody
    if not any(node.name not in constant for node in others):
        return Companions(graph, ())  # nothing that they could go along with
    made = {name: _stand_in(graph.tensors[name]) for node in needed for name in node.outputs}
    return Companions(replace(graph, nodes=others, weights={**graph.weights, **made}), needed, frozenset(folded))


def _stand_in(spec: TensorSpec) -> WeightRecipe:
    """Of a tensor that is there wherever it is read, as weights are."""
    return WeightRecipe(BufferSpec(spec.name, spec.dtype, spec.dtype, dense(spec.shape)), ())


def _bound(node: OpNode) -> OpNode | None:
    try:
        found = bind(node.name, node.op, list(node.tensors()), dict(node.attrs))
    except (IRError, UnsupportedOpError):
        return None
    return replace(node, inputs=found.inputs, attrs=found.attrs)
