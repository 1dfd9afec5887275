"""All that keeps a model from running on a device as a whole, where `compile` stops at the first such node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from npu_compiler.artifact.describe import counted
from npu_compiler.compiler import compute_dtype
from npu_compiler.frontend.ir_source import IRSource
from npu_compiler.graph.data_types import assign_dtypes
from npu_compiler.ir import OpNode
from npu_compiler.lowering.target import target_named
from npu_compiler.op_support import Support
from npu_compiler.partitioning.carried_graph import read_carried_graph, without_shared_memory
from npu_compiler.partitioning.placement import place
from npu_compiler.partitioning.support_rules import target_rule

__all__ = ["Refusal", "refusals", "refusals_text"]

_NODES_LISTED = 4


class Refusal(NamedTuple):
    """An op that does not lower, why, and the names of the nodes that it concerns."""

    op: str
    reason: str
    nodes: tuple[str, ...]


def refusals(source: IRSource, target: str) -> list[Refusal]:
    """What of a model does not lower for a target, in the order of the model.

    Raises:
        IRError: The IR is malformed.
        CompileError: There is no such target.
    """
    codegen = target_named(target)
    graph = without_shared_memory(read_carried_graph(source)).graph
    tensors = assign_dtypes(graph, compute_dtype(graph, codegen, None)).tensors
    lowers = target_rule(codegen, tensors)
    found: dict[tuple[str, str], list[str]] = {}

    def support(node: OpNode) -> Support:
        answer = lowers(node)
        if not answer:
            found.setdefault((node.op, answer.reason), []).append(node.name)
        return answer

    place(graph, support)
    return [Refusal(op, reason, tuple(nodes)) for (op, reason), nodes in found.items()]


def refusals_text(found: Sequence[Refusal]) -> str:
    """One line for each op and reason."""
    return "\n".join(f"  {refusal.op} ({_nodes(refusal.nodes)}): {refusal.reason}" for refusal in found)


def _nodes(names: Sequence[str]) -> str:
    rest = len(names) - _NODES_LISTED
    return ", ".join(names[:_NODES_LISTED]) + (f" and {counted(rest, 'other')}" if rest > 0 else "")
