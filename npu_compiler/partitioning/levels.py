"""Groups the nodes of each side without cycles.

The level of a node is how often a path to it, from any node without predecessors, changes sides at the most. All nodes
of a level are on one side, and what a node reads lies on its own level or on a lower one, so that levels, taken as
partitions, form no cycle, whatever the graph. One sweep over the edges finds them.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["components", "levels"]


def levels(
    predecessors: Sequence[Sequence[int]], on_device: Sequence[bool], runs: Sequence[tuple[int, int]]
) -> list[int]:
    """The level of each node, numbered without gaps.

    Args:
        predecessors: Positions of the nodes that each node reads from, all lower than its own.
        on_device: The side of each node.
        runs: Pairs (first, last) of positions whose nodes share a level; all nodes of a run are on one side.
    """
    candidates = [_levels_from(predecessors, on_device, runs, start) for start in (True, False)]
    return min(candidates, key=lambda found: len(set(found)))


def _levels_from(
    predecessors: Sequence[Sequence[int]], on_device: Sequence[bool], runs: Sequence[tuple[int, int]], start: bool
) -> list[int]:
    """Levels when nodes without predecessors on side `start` are on level 0, and those of the other side on level 1."""
    found = [0] * len(predecessors)
    last_of_run = dict(runs)
    position = 0
    while position < len(predecessors):
        end = last_of_run.get(position, position)
        side = on_device[position]
        level = 0 if side == start else 1
        for node in range(position, end + 1):
            for before in predecessors[node]:
                if before < position:
                    level = max(level, found[before] + (on_device[before] != side))
        found[position : end + 1] = [level] * (end + 1 - position)
        position = end + 1
    numbers = {level: number for number, level in enumerate(sorted(set(found)))}
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
