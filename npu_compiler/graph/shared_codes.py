"""Tensors that are rounded to codes for several readers alike: it is done once."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.ir import IRGraph
from npu_compiler.ops.registry import spelled, traits_of
from npu_compiler.ops.row_codes import quantize

__all__ = ["share_codes"]


def share_codes(graph: IRGraph) -> IRGraph:
    """Nodes that make codes, or numbers of codes, of the same tensors in the same way become one.

    So linears that share an input still do when each of them has rounded it.
    """
    first: dict[str, tuple[str, ...]] = {}
    names: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = node.renamed(names)
        if node.op == spelled(quantize) or traits_of(node.op, node.attrs).makes_numbers:
            key = repr((node.op, sorted(node.inputs.items()), sorted(node.attrs.items(), key=str)))
            made = first.setdefault(key, node.outputs)
            if made is not node.outputs and len(made) == len(node.outputs):
                names.update(zip(node.outputs, made, strict=True))
                continue
        nodes.append(node)
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)
