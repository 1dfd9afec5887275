"""Operands that are made where they are read: an anchor's launches may compute, or scatter, what only they look at.

So a decode step rotates its queries and writes its cache inside of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.schedule import needed_groups, readers_of
from npu_compiler.tensor.trace import Scatter

__all__ = ["with_producers"]


def with_producers(
    groups: Mapping[int, list[Group]], outputs: Collection[int], accepts: Callable[[Group, int, Group], bool]
) -> dict[int, list[Group]]:
    """Makes an anchor's operands where the anchor is computed, if nobody else reads them and the target can.

    A scatter may be an output at the same time: its launch has then run before the function ends, as it would have.

    Args:
        groups: What computes each tensor.
        outputs: Tensors that must be stored all the same.
        accepts: Whether a group's launches can make its operand, given by its position and by what makes it.
    """
    readers = readers_of(groups, outputs)
    result = dict(groups)
    for part in needed_groups(groups, outputs):
        if part.problem is None or part.index is not None:
            continue
        made: dict[int, Group] = {}
        for position, operand in enumerate(part.problem.operands):
            index = operand.tensor.index
            producers = groups.get(index, [])
            if readers.get(index) != 1 or len(producers) != 1 or position in part.prologue:
                continue
            stored = index in outputs and not isinstance(producers[0].output.source, Scatter)
            if not stored and accepts(part, position, producers[0]):
                made[position] = producers[0]
                del result[index]
        if made:
            nodes = tuple(dict.fromkeys(name for group in (*made.values(), part) for name in group.nodes))
            result[part.output.index] = [replace(part, producers=made, nodes=nodes)]
    return result
