"""Codes whose zero point is the least of them, as those of what a ReLU gives, become unsigned: zero is 0 then."""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.dtypes import INT8, UINT8
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.quantization import dequantize_per_tensor, quantize_per_tensor
from npu_compiler.ops.registry import spelled

__all__ = ["count_codes_from_zero"]

_LIMITS = ("scale", "zero_point", "quant_min", "quant_max", "dtype")


def count_codes_from_zero(graph: IRGraph) -> IRGraph:
    """The graph whose int8 codes are uint8 where their zero point is the least code and only dequantising reads them.

    What lies around an image of such codes is zeros.
    """
    users, tensors = graph.users(), dict(graph.tensors)
    renewed: dict[str, OpNode] = {}
    for node in graph.nodes:
        if node.op != spelled(quantize_per_tensor) or not _starts_at_zero(node):
            continue
        (made,) = node.outputs
        readers = users.get(made, [])
        if made not in graph.outputs and readers and all(_takes_back(reader, node) for reader in readers):
            tensors[made] = replace(tensors[made], dtype=UINT8)
            renewed |= {each.name: _from_zero(each) for each in (node, *readers)}
    if not renewed:
        return graph
    return replace(graph, nodes=tuple(renewed.get(node.name, node) for node in graph.nodes), tensors=tensors)


def _starts_at_zero(node: OpNode) -> bool:
    zero, low, high = (node.attrs.get(name) for name in ("zero_point", "quant_min", "quant_max"))
    whole = type(zero) is type(low) is type(high) is int
    return whole and zero == low and node.attrs.get("dtype") == INT8.name


def _takes_back(reader: OpNode, made: OpNode) -> bool:
    """Whether a node makes numbers of the codes of another."""
    same = all(reader.attrs.get(name) == made.attrs.get(name) for name in _LIMITS)
    return reader.op == spelled(dequantize_per_tensor) and same


def _from_zero(node: OpNode) -> OpNode:
    highest = node.attrs["quant_max"] - node.attrs["quant_min"]
    limits = {"zero_point": 0, "quant_min": 0, "quant_max": highest, "dtype": UINT8.name}
    return replace(node, attrs={**node.attrs, **limits})
