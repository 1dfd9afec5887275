"""Problems that are computed where another one reads their results, if the target can.

So a network's first max pooling compares the results of the convolution ahead of it, which never go to memory; and a
convolution of one tap multiplies the results of another one where these are made, whoever else reads them.
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
    """Computes a problem in the launches of one that reads its results, where the target can.

    Where others read them too, or they are an output, these launches store them as well.

    Args:
        groups: What computes each tensor.
        outputs: Tensors that must be stored all the same.
        loads: Whether a group's launches can load an operand of a form.
    """
    flow, result = Dataflow(groups, outputs), dict(groups)
    for group in flow.needed:
        for position, operand in enumerate(() if group.problem is None else group.problem.operands):
            index = operand.tensor.index
            makers = result.get(index, [])
            if len(makers) != 1 or group.times_read(index) != 1 or not _is_all_of(operand, makers[0]):
                continue
            private = flow.readers[index] == 1 and index not in outputs
            if not private and any(read in groups for read in group.reads() if read != index):
                continue  # what else it reads may have to be made of the results first
            form = Produced(operand.tensor, operand.ref, makers[0], not private)
            if loads(group, position, form):
                joined = [group.loading(position, form).after(makers[0].nodes)]
                result |= dict.fromkeys((group.output.index, *form.stores()), joined)
                break
    return result


def _is_all_of(operand: Operand, made: Group) -> bool:
    """Whether an operand is what a problem gives, element by element, and that reads nothing but memory."""
    if made.problem is None or made.index is not None or made.beside is not None or made.followers:
        return False
    whole = type(operand) is Operand and made.pairs == 1 and operand.view.same_elements(made.view)
    return whole and made.problem.is_stored
