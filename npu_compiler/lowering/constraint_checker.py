"""What the NPU asks of every tensor: a data type its memory holds, and a size its kernels can address."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod

from npu_compiler.dtypes import ALL
from npu_compiler.errors import UnsupportedOpError
from npu_compiler.ir import IRGraph, OpNode, TensorSpec

__all__ = ["MAX_RANK", "check_constraints", "violation"]

MAX_RANK = 8
_MAX_ELEMENTS = 1 << 31


def violation(specs: Iterable[TensorSpec], storage_dtypes: Collection[str]) -> str | None:
    """Why one of the tensors cannot be on the device; None where all can."""
    for spec in specs:
        if spec.dtype.stored.name not in storage_dtypes:
            held = ", ".join(sorted(kind.name for kind in ALL if kind.stored.name in storage_dtypes))
            return f"'{spec.name}' is {spec.dtype}, the device holds {held}; convert the model before extraction"
        if len(spec.shape) > MAX_RANK:
            return f"'{spec.name}' has {len(spec.shape)} dimensions, at most {MAX_RANK} are supported"
        if prod(spec.shape) >= _MAX_ELEMENTS:
            return f"'{spec.name}' has {prod(spec.shape)} elements, kernels address fewer than 2^31"
    return None


def check_constraints(graph: IRGraph, storage_dtypes: Collection[str]) -> None:
    """Checks every node of a graph.

    Raises:
        UnsupportedOpError: A tensor of a node cannot be on the device.
    """
    for node in graph.nodes:
        reason = violation(_tensors_of(node, graph), storage_dtypes)
        if reason is not None:
            raise UnsupportedOpError(node.name, node.op, reason)


def _tensors_of(node: OpNode, graph: IRGraph) -> Iterable[TensorSpec]:
    return (graph.tensors[name] for name in (*node.tensors(), *node.outputs))
