"""Divides a graph: a side for every node, islands given back to the CPU, levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from npu_compiler.ir import IRGraph, TensorSpec
from npu_compiler.partitioning.islands import find_islands
from npu_compiler.partitioning.levels import components, levels
from npu_compiler.partitioning.placement import Placement, SupportRule, place

__all__ = ["Division", "divide"]


@dataclass(frozen=True)
class Division:
    """The side of each node of a graph and the level it is on, in the graph's order."""

    placements: Sequence[Placement]
    levels: Sequence[int]


def divide(graph: IRGraph, device_tensors: Mapping[str, TensorSpec], support: SupportRule) -> Division:
    """Divides `graph`, whose tensors are on the device as `device_tensors` says."""
    placements = place(graph, support)
    predecessors = _predecessors(graph)
    while True:
        on_device = [placement.on_device for placement in placements]
        found = levels(predecessors, on_device)
        if all(on_device) or not any(on_device):
            return Division(placements, found)
        islands = find_islands(graph, device_tensors, on_device, components(predecessors, found))
        poor = [island for island in islands if not island.is_worth_moving]
        if not poor:
            return Division(placements, found)
        # What goes to the CPU changes what its neighbours have to move, so that they are weighed again.
        for island in poor:
            for position in island.nodes:
                placements[position] = Placement(False, island.reason)


def _predecessors(graph: IRGraph) -> list[list[int]]:
    """For each node the positions of the nodes it reads from."""
    maker = {name: position for position, node in enumerate(graph.nodes) for name in node.outputs}
    return [sorted({maker[name] for name in node.tensors() if name in maker}) for node in graph.nodes]
