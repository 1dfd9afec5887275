"""``addmm(bias, x, w.T)`` and ``mm(x, w.T)`` are linears, also where reshapes make rows of their operand and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from npu_compiler.fusion_patterns import without_dead_nodes
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.linear import linear as linear_op
from npu_compiler.ops.registry import spelled, traits_of
from npu_compiler.ops.rows import MALFORMED

__all__ = ["spell_linears"]


def spell_linears(graph: IRGraph) -> IRGraph:
    """Writes products by a transposed matrix as linears, which later passes merge and divide."""
    producers, users = graph.producers(), graph.users()
    replaced: dict[str, OpNode] = {}
    for node in graph.nodes:
        linear = _linear(node, graph, producers)
        if linear is None:
            continue
        whole = _around_reshapes(linear, graph, producers, users)
        replaced[node.name if whole is None else users[node.outputs[0]][0].name] = whole or linear
    if not replaced:
        return graph
    return without_dead_nodes(replace(graph, nodes=tuple(replaced.get(node.name, node) for node in graph.nodes)))


def _linear(node: OpNode, graph: IRGraph, producers: Mapping[str, OpNode]) -> OpNode | None:
    """The linear that a product is, of rows as it has them."""
    given, inputs = traits_of(node.op).matrices, {key: str(value) for key, value in node.inputs.items()}
    if given is None or any(node.attrs.get(key, 1) != 1 for key in ("alpha", "beta")):
        return None
    rows, matrix = inputs[given.rows], inputs[given.matrix]
    made = producers.get(matrix)
    if len(graph.tensors[matrix].shape) != 2 or made is None or not _transposes(made):
        return None
    parameters = {"weight": str(next(made.tensors()))}
    if given.added:
        if graph.tensors[inputs[given.added]].shape != graph.tensors[matrix].shape[1:]:
            return None
        parameters["bias"] = inputs[given.added]
    return replace(node, op=spelled(linear_op), inputs={"input": rows, **parameters}, attrs={})


def _transposes(node: OpNode) -> bool:
    """Whether a node that makes a matrix turns one around."""
    turn = traits_of(node.op).turn
    try:
        return turn is not None and list(turn(node.attrs, 2)) == [1, 0]
    except MALFORMED:
        return False


def _around_reshapes(
    linear: OpNode, graph: IRGraph, producers: Mapping[str, OpNode], users: Mapping[str, list[OpNode]]
) -> OpNode | None:
    """The linear of what its rows were made from, where its only reader gives the rows that shape again."""
    made, readers = producers.get(str(linear.inputs["input"])), users.get(linear.outputs[0], [])
    if made is None or not traits_of(made.op).reshapes or len(readers) != 1 or linear.outputs[0] in graph.outputs:
        return None
    back = readers[0]
    if not traits_of(back.op).reshapes or next(back.tensors()) != linear.outputs[0]:
        return None
    source = str(next(made.tensors()))
    given, rows = graph.tensors[source].shape, graph.tensors[str(linear.inputs["input"])].shape
    columns = graph.tensors[linear.outputs[0]].shape[-1:]
    if len(given) < 2 or given[-1] != rows[-1] or graph.tensors[back.outputs[0]].shape != (*given[:-1], *columns):
        return None
    return replace(linear, inputs={**linear.inputs, "input": source}, outputs=back.outputs)
