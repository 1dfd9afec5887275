"""Finds in-place operations that a list of pure operations would get wrong.

torch.export keeps in-place operations as the model wrote them, and replaces later uses of the changed tensor by the
operation's result. Read as pure operations, the graph is then right unless the change is seen under another name: a
view taken before it, the tensor a view was taken of, a parameter, a buffer or an input.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.export import ExportedProgram
from torch.fx import Node

__all__ = ["calls_subgraph", "needs_functional_form"]

_WRITES_NO_VALUE = {torch.ops.aten.detach_.default}


def needs_functional_form(exported: ExportedProgram) -> bool:
    """Whether the graph holds subgraphs, or in-place operations that matter beyond their result."""
    nodes = list(exported.graph.nodes)
    if any(calls_subgraph(node) for node in nodes):
        return True
    sharing = _nodes_by_memory(nodes)
    position = {node: index for index, node in enumerate(nodes)}
    updatable = _returned_inputs(exported)
    for node in nodes:
        for changed in _written(node):
            for other in (other for memory in _memory(changed) for other in sharing[memory]):
                used_later = other is not node and any(position[user] > position[node] for user in other.users)
                holds_old_values = position[other] < position[node]
                if holds_old_values and (used_later or (other.op == "placeholder" and (other, node) not in updatable)):
                    return True
    return False


def calls_subgraph(node: Node) -> bool:
    """Whether the node is part of a call to a graph inside the graph, as torch's higher-order operators make."""
    return node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator)


def _memory(node: Node) -> set[int]:
    """Identities of the storages that a node's result lies in; torch.export traced it with tensors that have them."""
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else (value,)
    return {item.untyped_storage()._cdata for item in items if isinstance(item, torch.Tensor)}


def _nodes_by_memory(nodes: list[Node]) -> dict[int, list[Node]]:
    sharing: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        for memory in _memory(node):
            sharing[memory].append(node)
    return sharing


def _returned_inputs(exported: ExportedProgram) -> set[tuple[Node, Node]]:
    """Pairs (input, result) of in-place operations on a whole input whose result is an output: no change is lost."""
    inputs, outputs = set(exported.graph_signature.user_inputs), set(exported.graph_signature.user_outputs)
    return {
        (changed, node)
        for node in exported.graph.nodes
        if node.name in outputs
        for changed in _written(node)
        if changed.op == "placeholder" and changed.name in inputs
    }


def _written(node: Node) -> list[Node]:
    """The tensors that an operation changes in place."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target in _WRITES_NO_VALUE:
        return []
    values = [*node.args, *(node.kwargs.get(argument.name) for argument in target._schema.arguments[len(node.args) :])]
    return [
        value
        for argument, value in zip(target._schema.arguments, values, strict=True)
        if isinstance(value, Node) and argument.alias_info is not None and argument.alias_info.is_write
    ]
