"""Nodes that take some rows of a tensor: what they take, and how to take the same rows of another tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from npu_compiler.graph.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.graph.row_rules import MALFORMED, Rows
from npu_compiler.ops.registry import kind_of

__all__ = ["Selection", "selection_of", "take"]


@dataclass(frozen=True)
class Selection:
    """Some rows of a tensor.

    Attributes:
        source: The tensor.
        dim: The dimension along which they are taken, counted from the front.
        rows: Which they are.
    """

    source: str
    dim: int
    rows: Rows


def selection_of(node: OpNode, graph: IRGraph) -> Selection | None:
    """What a node takes, where it takes at most half: more leave a product as large as it is."""
    source = node.inputs.get("weight" if kind_of(node.op) == "embedding" else "self")
    if not isinstance(source, str) or source in graph.weights or not node.outputs:
        return None
    shape = graph.tensors[source].shape
    found = None
    try:
        if kind_of(node.op) in ("select", "slice", "narrow"):
            found = _known(node, source, shape)
        elif kind_of(node.op) in ("index_select", "index", "embedding"):
            found = _indexed(node, source, graph.tensors)
    except MALFORMED:
        return None
    return found if found is not None and 0 < 2 * found.rows.count <= found.rows.size else None


def _known(node: OpNode, source: str, shape: tuple[int, ...]) -> Selection | None:
    attrs = node.attrs
    dim = int(attrs.get("dim", 0))
    if not -len(shape) <= dim < len(shape) or attrs.get("step", 1) < 1:
        return None
    size = shape[dim]
    if kind_of(node.op) == "slice":
        taken = range(*slice(attrs.get("start"), attrs.get("end"), int(attrs.get("step", 1))).indices(size))
    else:
        start = int(attrs["index" if kind_of(node.op) == "select" else "start"])
        start += size if start < 0 else 0
        taken = range(start, start + int(attrs.get("length", 1)))
    inside = all(0 <= position < size for position in (taken[0], taken[-1])) if taken else False
    return Selection(source, dim % len(shape), Rows(len(taken), size, taken)) if inside else None


def _indexed(node: OpNode, source: str, tensors: Mapping[str, TensorSpec]) -> Selection | None:
    """By a tensor of positions; of dimensions of one position ahead, there is nothing to choose."""
    by_dim = kind_of(node.op) == "index_select"
    given = node.inputs["index" if by_dim else "indices"]
    *ahead, index = (given,) if isinstance(given, str) else given
    shape, positions = tensors[source].shape, tensors[index].shape
    dim = int(node.attrs["dim"]) % len(shape) if by_dim else len(ahead)
    alone = all(shape[i : i + 1] == (1,) and tensors[name].shape in ((1,), positions) for i, name in enumerate(ahead))
    fits = len(positions) == 1 and dim < len(shape) and alone and tensors[index].dtype.is_integer
    if not fits or source in (index, *ahead):
        return None
    return Selection(source, dim, Rows(positions[0], shape[dim], index=index, wraps=kind_of(node.op) == "index"))


def take(selection: Selection, output: str) -> OpNode:
    """The node that makes `output` of the rows of a selection; the dimension stays."""
    rows, inputs = selection.rows, {"self": selection.source}
    if rows.known is None:
        op, attrs = "aten.index_select.default", {"dim": selection.dim, **({"_wraps": True} if rows.wraps else {})}
        return OpNode(output, op, inputs | {"index": rows.index}, attrs, (output,))
    bounds = (selection.dim, rows.known.start, rows.known[-1] + 1, rows.known.step)
    attrs = dict(zip(("dim", "start", "end", "step"), bounds, strict=True))
    return OpNode(output, "aten.slice.Tensor", inputs, attrs, (output,))
