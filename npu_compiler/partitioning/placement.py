"""Chooses a side, device or CPU, for every node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from npu_compiler.ir import IRGraph, OpNode
from npu_compiler.op_support import Support
from npu_compiler.ops.registry import traits_of
from npu_compiler.ops.traits import Work

__all__ = ["Placement", "is_free", "place"]

SupportRule = Callable[[OpNode], Support]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a node runs; `reason` says why it is on the CPU, and is empty for the device."""

    on_device: bool
    reason: str = ""


def is_free(node: OpNode) -> bool:
    """Whether a node computes nothing: a view, a no-op, a choice among results, or an assertion on shapes."""
    known = traits_of(node.op, node.attrs)
    return known.is_silent or known.work is Work.VIEW


def place(graph: IRGraph, support: SupportRule) -> list[Placement]:
    """Places the nodes of a graph, in its order.

    What computes runs on the device wherever it is supported. What is free goes where its operand is made, and what
    reads no node's result goes where it is read first; neither ever causes a switch by itself.
    """
    placements: list[Placement | None] = [None] * len(graph.nodes)
    maker = {name: position for position, node in enumerate(graph.nodes) for name in node.outputs}
    undecided = []
    for position, node in enumerate(graph.nodes):
        producer = _producer(node, maker)
        if producer is None and (is_free(node) or not node.inputs):
            undecided.append(position)
        elif producer is not None and is_free(node):
            followed = placements[producer]
            if followed is None:
                undecided.append(position)
            else:
                placements[position] = _follow(node, followed, graph.nodes[producer], support)
        else:
            placements[position] = _by_support(node, support)
    _place_by_readers(graph, undecided, placements, support)
    return [placement for placement in placements if placement is not None]


def _producer(node: OpNode, maker: dict[str, int]) -> int | None:
    """Position of the node that makes what a free node passes on: its first tensor."""
    source = next(iter(node.tensors()), None)
    return None if source is None else maker.get(source)


def _by_support(node: OpNode, support: SupportRule) -> Placement:
    answer = Support(True) if traits_of(node.op, node.attrs).is_silent else support(node)
    return Placement(answer.ok, "" if answer.ok else answer.reason or "the target refuses it")


def _follow(node: OpNode, followed: Placement, producer: OpNode, support: SupportRule) -> Placement:
    if followed.on_device:
        return _by_support(node, support)
    return Placement(False, f"it costs nothing where its operand is, and '{producer.name}' runs on the CPU")


def _place_by_readers(
    graph: IRGraph, undecided: Sequence[int], placements: list[Placement | None], support: SupportRule
) -> None:
    """Places nodes that read only what the caller gives, the last first, beside the first node that reads them."""
    readers: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.tensors():
            readers.setdefault(name, position)
    for position in reversed(undecided):
        node = graph.nodes[position]
        reader = min((readers[name] for name in node.outputs if name in readers), default=None)
        beside = placements[reader] if reader is not None else None
        if beside is not None and not beside.on_device and reader is not None:
            reason = f"it reads nothing from the device, and '{graph.nodes[reader].name}' on the CPU reads it"
            placements[position] = Placement(False, reason)
        else:
            placements[position] = _by_support(node, support)
