"""Groups the nodes of each side without cycles.

The level of a node is how often a path to it, from any node without predecessors, changes sides at the most. All nodes
of a level are on one side, and what a node reads lies on its own level or on a lower one, so that levels, taken as
partitions, form no cycle, whatever the graph. A second sweep moves every node up to where it is first read, so that it
shares a program, and perhaps a kernel, with its readers. Both sweeps are linear in the edges.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["components", "levels"]


def levels(predecessors: Sequence[Sequence[int]], on_device: Sequence[bool]) -> list[int]:
    """The level of each node, numbered without gaps.

    Args:
        predecessors: Positions of the nodes that each node reads from, all lower than its own.
        on_device: The side of each node.
    """
    candidates = []
    for start in (True, False):
        lowest = _lowest_levels(predecessors, on_device, start)
        candidates.append(_numbered(_raised(lowest, predecessors, on_device), on_device))
    return min(candidates, key=lambda found: len(set(found)))


def _lowest_levels(predecessors: Sequence[Sequence[int]], on_device: Sequence[bool], start: bool) -> list[int]:
    """Levels when nodes without predecessors on side `start` are on level 0, and those of the other side on level 1."""
    found: list[int] = []
    for side, ahead in zip(on_device, predecessors, strict=True):
        least = 0 if side == start else 1
        found.append(max([least, *(found[before] + (on_device[before] != side) for before in ahead)]))
    return found


def _raised(lowest: Sequence[int], predecessors: Sequence[Sequence[int]], on_device: Sequence[bool]) -> list[int]:
    """Every node on the highest level that its readers allow; what nobody reads stays where it is."""
    found = list(lowest)
    limits: dict[int, int] = {}
    for node in range(len(found) - 1, -1, -1):
        found[node] = limits.get(node, found[node])
        for before in predecessors[node]:
            limit = found[node] - (on_device[before] != on_device[node])
            limits[before] = min(limits.get(before, limit), limit)
    return found


def _numbered(found: Sequence[int], on_device: Sequence[bool]) -> list[int]:
    """Levels without gaps; levels of one side with nothing between them become one."""
    side_of = dict(zip(found, on_device, strict=True))
    numbers: dict[int, int] = {}
    previous: bool | None = None
    number = -1
    for level, side in sorted(side_of.items()):
        number += side != previous
        numbers[level] = number
        previous = side
    return [numbers[level] for level in found]


def components(predecessors: Sequence[Sequence[int]], level: Sequence[int]) -> list[int]:
    """For each node a representative, the same for nodes that edges within their level connect."""
    parent = list(range(len(level)))

    def find(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node, before in enumerate(predecessors):
        for other in before:
            if level[other] == level[node]:
                parent[find(node)] = find(other)
    return [find(node) for node in range(len(level))]
