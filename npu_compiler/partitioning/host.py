"""What a machine's processor and its link to the device are taken to be, where a plan has to weigh them.

Rates of a common desktop, as the rule of islands has them; and what a run costs beside the bytes, as
`benchmarks.mixed_calls` measured it on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from npu_compiler.ir import IRGraph, OpNode, TensorSpec
from npu_compiler.ops.registry import traits_of

__all__ = ["HOST_GBS", "HOST_GFLOPS", "LINK_GBS", "PARTITION_US", "TRANSFER_US"]
__all__ += ["crossings", "flops_of", "nbytes_of", "touched_by"]

LINK_GBS = 12.0  # between host and device
HOST_GBS = 48.0  # what the CPU reads and writes
HOST_GFLOPS = 48.0
PARTITION_US = 19.0  # a partition, beyond what it computes
TRANSFER_US = 8.0  # a transfer, beyond its bytes


def nbytes_of(spec: TensorSpec) -> int:
    """Bytes of a tensor's elements, without padding."""
    return prod(spec.shape) * spec.dtype.size


def touched_by(node: OpNode, tensors: Mapping[str, TensorSpec]) -> int:
    """Bytes that a node reads and writes."""
    return sum(nbytes_of(tensors[name]) for name in (*node.tensors(), *node.outputs))


def flops_of(node: OpNode, tensors: Mapping[str, TensorSpec]) -> int:
    """Floating-point operations of a node: as its op's traits say, else one for each element it touches."""
    operands = [tensors[name].shape for name in node.tensors()]
    made = sum(prod(tensors[name].shape) for name in node.outputs)
    rule = traits_of(node.op).flops
    flops = None if rule is None else rule(operands, made)
    return max([made, *map(prod, operands)]) if flops is None else flops


def crossings(graph: IRGraph, on_device: Mapping[str, bool]) -> dict[str, bool]:
    """The tensors that cross between host and device, each once; and whether it is towards the host.

    Args:
        graph: The model.
        on_device: The side of each node, by name.
    """
    makers: dict[str, OpNode | None] = dict.fromkeys(graph.inputs)
    readers: dict[str, set[bool]] = {}
    for node in graph.nodes:
        makers.update(dict.fromkeys(node.outputs, node))
        for name in node.tensors():
            readers.setdefault(name, set()).add(on_device[node.name])
    wanted = set(graph.outputs)
    found = {}
    for name, maker in makers.items():
        made_there = maker is not None and on_device[maker.name]
        if (not made_there) in readers.get(name, ()) or (made_there and name in wanted):
            found[name] = made_there
    return found
