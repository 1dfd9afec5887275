"""Nodes that take some rows of a tensor: what they take, and how to take the same rows of another tensor."""

from __future__ import annotations

from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.indexing import index_select
from npu_compiler.ops.registry import spelled, traits_of
from npu_compiler.ops.rows import MALFORMED, Selection
from npu_compiler.ops.views import slice_

__all__ = ["selection_of", "taking"]


def selection_of(node: OpNode, graph: IRGraph) -> Selection | None:
    """The rows that a node takes of its operand; None for none, and for more than half, which saves too little."""
    rule = traits_of(node.op).selects
    if rule is None or not node.outputs:
        return None
    try:
        found = rule(node, graph.tensors)
    except MALFORMED:
        return None
    if found is None or found.source in graph.weights:
        return None
    return found if 0 < 2 * found.rows.count <= found.rows.size else None


def taking(selection: Selection, output: str) -> OpNode:
    """The node that makes `output`, the rows of a selection; its dimension stays, with as many positions as rows."""
    rows, inputs = selection.rows, {"self": selection.source}
    if rows.known is None:
        op, attrs = spelled(index_select), {"dim": selection.dim, **({"_wraps": True} if rows.wraps else {})}
        return OpNode(output, op, inputs | {"index": rows.index}, attrs, (output,))
    bounds = (selection.dim, rows.known.start, rows.known[-1] + 1, rows.known.step)
    attrs = dict(zip(("dim", "start", "end", "step"), bounds, strict=True))
    return OpNode(output, spelled(slice_), inputs, attrs, (output,))
