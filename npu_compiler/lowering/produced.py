"""Problems that are computed where another one reads their results, if nobody else does and the target can.

So a network's first max pooling compares the results of the convolution ahead of it, which never go to memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from npu_compiler.lowering.grouping import Group, Loads
from npu_compiler.lowering.problems.forms import Produced
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.schedule import Dataflow

__all__ = ["with_produced_operands"]


def with_produced_operands(
    groups: Mapping[int, list[Group]], outputs: Collection[int], loads: Loads
) -> dict[int, list[Group]]:
    """Computes a problem in the launches of the one that reads its results, where the target can.

    Args:
        groups: What computes each tensor.
        outputs: Tensors that must be stored all the same.
        loads: Whether a group's launches can load an operand of a form.
    """
    flow, result = Dataflow(groups, outputs), dict(groups)
    for group in flow.needed:
        for position, operand in enumerate(() if group.problem is None else group.problem.operands):
            made = flow.private_maker(operand.tensor.index, group)
            if made is None or made.output.index in outputs or not _is_all_of(operand, made):
                continue
            form = Produced(operand.tensor, operand.ref, made)
            if loads(group, position, form):
                result[group.output.index] = [group.loading(position, form).after(made.nodes)]
                break
    return result


def _is_all_of(operand: Operand, made: Group) -> bool:
    """Whether an operand is what a problem gives, element by element, and that reads nothing but memory."""
    if made.problem is None or made.added is not None or made.index is not None or made.beside is not None:
        return False
    whole = type(operand) is Operand and made.pairs == 1 and operand.view.same_elements(made.view)
    return whole and made.problem.is_stored
