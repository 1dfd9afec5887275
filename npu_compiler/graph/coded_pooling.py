"""Maxima of numbers that become codes, as maxima of the codes, which are smaller.

Rounding by a scale above zero keeps their order.
"""

from __future__ import annotations

from dataclasses import replace

from npu_compiler.dtypes import INT8, UINT8
from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.ops.pooling import max_pool2d, max_pool_codes
from npu_compiler.ops.quantization import quantize_per_tensor
from npu_compiler.ops.registry import spelled

__all__ = ["pool_codes"]


def pool_codes(graph: IRGraph) -> IRGraph:
    """The graph whose images are rounded to codes of a byte ahead of a max pooling, not behind it.

    That is done where nothing else reads the image or the result, with a batch.
    """
    users, producers, tensors = graph.users(), graph.producers(), dict(graph.tensors)
    turned: dict[str, OpNode] = {}
    for pooling in graph.nodes:
        rounding = _rounding_behind(pooling, graph, users) if pooling.op == spelled(max_pool2d) else None
        if rounding is None or pooling.inputs["self"] not in producers:
            continue
        (image,), (pooled,), (codes,) = pooling.tensors(), pooling.outputs, rounding.outputs
        tensors[pooled] = replace(tensors[image], name=pooled, dtype=tensors[codes].dtype)
        turned[pooling.name] = replace(rounding, inputs={"input": image}, outputs=(pooled,))
        inputs = {"input": pooled}
        turned[rounding.name] = replace(pooling, op=spelled(max_pool_codes), inputs=inputs, outputs=(codes,))
    if not turned:
        return graph
    return replace(graph, nodes=tuple(turned.get(node.name, node) for node in graph.nodes), tensors=tensors)


def _rounding_behind(pooling: OpNode, graph: IRGraph, users: dict[str, list[OpNode]]) -> OpNode | None:
    """The node that makes codes of a byte of what is pooled, where nothing else reads that, or what is pooled."""
    (image,), (pooled,) = pooling.tensors(), pooling.outputs
    readers = users.get(pooled, [])
    alone = len(readers) == 1 == len(users[image]) and not {image, pooled} & set(graph.outputs)
    if not alone or len(graph.tensors[image].shape) != 4 or readers[0].op != spelled(quantize_per_tensor):
        return None
    scale, made = readers[0].attrs.get("scale"), graph.tensors[readers[0].outputs[0]].dtype
    return readers[0] if isinstance(scale, float) and scale > 0 and made in (INT8, UINT8) else None
