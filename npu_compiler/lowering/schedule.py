"""Which kernels run, in what order, which of them share a launch, and what is updated in place."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.value import MAX_READS
from npu_compiler.tensor.expr import Checked, Load, leaves, walk
from npu_compiler.tensor.symbolic import Trace
from npu_compiler.tensor.trace import Scatter, TracedTensor, users_of

__all__ = ["Dataflow", "InPlace", "find_in_place", "needed_groups", "schedule"]

_MAX_SHARED_GROUPS = 8
_MOST_POINTERS = 30  # of a kernel: Metal binds 31 buffers, of which one holds parameters
_MOST_WAITING = 1 << 16  # elements that may lie in memory from early on until something reads them


@dataclass(frozen=True)
class InPlace:
    """Which scatters change the memory of the tensor that they start from, and why others copy it first.

    Attributes:
        aliases: Index of a scatter's tensor -> index of the tensor whose memory it has.
        state: Index of an output -> index of the input whose memory it has.
        notes: Why other scatters copy.
    """

    aliases: Mapping[int, int]
    state: Mapping[int, int]
    notes: tuple[str, ...]


def find_in_place(trace: Trace, inputs: Collection[int], weights: Collection[int], outputs: Collection[int]) -> InPlace:
    """Finds the scatters that may change the memory of the tensor that they start from.

    Nothing else may read the old value, and the memory must be an intermediate tensor's, or that of an input which
    becomes an output (a KV cache): that output then is the caller's own buffer.

    Args:
        trace: The trace.
        inputs, weights, outputs: Indices of these tensors in it.
    """
    readers = users_of(trace.tensors)
    aliases: dict[int, int] = {}
    state: dict[int, int] = {}
    notes = []
    reaching = _reach_outputs(trace, set(outputs))
    for tensor in trace.tensors:
        if not isinstance(tensor.source, Scatter):
            continue
        base = tensor.source.into.tensor
        others = readers[base] - {tensor.index}
        root = aliases.get(base, base)
        reason = _refusal(trace, tensor, root, others, base in outputs, root in weights)
        if reason is None and base in _moving(tensor.source):
            reason = "the new values are read from other places of it"
        if reason is None and root in inputs and tensor.index not in reaching:
            reason = f"the input '{trace.tensors[root].name}' does not become an output"
        if reason is None:
            aliases[tensor.index] = root
            if root in inputs and tensor.index in outputs:
                state[tensor.index] = root
        else:
            notes.append(f"'{tensor.name}' copies '{trace.tensors[base].name}' before it writes: {reason}")
    return InPlace(aliases, state, tuple(notes))


def _moving(source: Scatter) -> set[int]:
    """The tensors that the new values, or the places where they go, are read from."""
    return {load.ref.tensor for expr in (source.expr, source.index) for load in leaves(expr)}


def _refusal(
    trace: Trace, tensor: TracedTensor, root: int, others: Collection[int], is_output: bool, is_weight: bool
) -> str | None:
    if others:
        names = ", ".join(sorted({f"'{trace.tensors[i].name}'" for i in others}))
        return f"the old value is also read by {names}"
    if is_output:
        return "the old value is an output of the graph"
    if is_weight:
        return "a weight must not change"
    if trace.tensors[root].layout != tensor.layout:
        return "the two lie differently in memory"
    return None


def _reach_outputs(trace: Trace, outputs: Collection[int]) -> set[int]:
    """Indices of the outputs, and of tensors from which scatters, one after another and no second one, lead to one."""
    following: dict[int, list[int]] = {}
    for tensor in trace.tensors:
        if isinstance(tensor.source, Scatter):
            following.setdefault(tensor.source.into.tensor, []).append(tensor.index)
    reaching: set[int] = set()
    for tensor in reversed(trace.tensors):
        behind = following.get(tensor.index, [])
        if tensor.index in outputs or (len(behind) == 1 and behind[0] in reaching):
            reaching.add(tensor.index)
    return reaching


class Dataflow:
    """What computes each tensor, and what reads it: what passes over groups ask.

    Attributes:
        groups: What computes each tensor, by its index.
        outputs: Tensors that must be stored all the same.
        needed: The groups that the outputs need, depth first.
        readers: How many of these read each tensor.
    """

    def __init__(self, groups: Mapping[int, list[Group]], outputs: Collection[int]) -> None:
        self.groups, self.outputs = groups, outputs
        self.needed = needed_groups(groups, outputs)
        self.readers = Counter(index for group in self.needed for index in group.reads())

    def maker(self, index: int) -> Group | None:
        """What computes a tensor; None for an input, or where that is several groups."""
        makers = self.groups.get(index, ())
        return makers[0] if len(makers) == 1 else None

    def private_maker(self, index: int, reader: Group) -> Group | None:
        """What computes a tensor that nothing but one group reads, and that once; None where it is otherwise."""
        return self.maker(index) if self.readers[index] == 1 == reader.times_read(index) else None


def schedule(
    groups: Mapping[int, list[Group]], outputs: Collection[int], shared_elements: int
) -> list[tuple[Group, ...]]:
    """The launches that the outputs need, each after those whose result it reads.

    Small elementwise kernels that do not depend on each other share a launch: a step of a language model is short of
    launches, not of work in each.

    Args:
        groups: What computes each tensor, by its index.
        outputs: What must be in memory in the end.
        shared_elements: Results of a kernel that may share its launch.
    """
    launches: list[list[Group]] = []
    open_places: list[int] = []  # of launches that further groups may join, in order
    made_at: dict[int, int] = {}
    for group in needed_groups(groups, outputs):
        if not prod(group.shape):
            continue
        after = max((made_at[index] for index in _needs(group) if index in made_at), default=-1)
        place = len(launches)
        if group.is_elementwise and prod(group.shape) <= shared_elements:
            later = open_places[bisect_right(open_places, after) :]
            if after < 0 and prod(group.shape) > _MOST_WAITING:  # a dequantised weight, which nothing has to precede
                later = [place for place in later if place == len(launches) - 1]
            place = next((i for i in later if _fits(group, launches[i])), place)
            if place == len(launches):
                open_places.append(place)
        if place == len(launches):
            launches.append([])
        launches[place].append(group)
        if len(launches[place]) == _MAX_SHARED_GROUPS:
            open_places.remove(place)
        made_at[group.output.index] = max(place, made_at.get(group.output.index, place))
    return [tuple(members) for members in launches]


def _fits(group: Group, members: Sequence[Group]) -> bool:
    """Whether one kernel can bind the tensors of all: each has pointers of its own, and one to its result."""
    together = (group, *members)
    if sum(len(member.reads()) + 1 for member in together) > MAX_READS:
        return False
    return sum(map(_pointers, together)) <= _MOST_POINTERS


def _pointers(group: Group) -> int:
    """What an elementwise kernel binds: its result, what it reads, by where that begins, and the record of faults."""
    exprs = (group.expr,) if group.index is None else (group.expr, group.index)
    nodes = [node for expr in exprs for node in walk(expr)]
    begins = {(node.ref.tensor, node.ref.view.offset) for node in nodes if isinstance(node, Load)}
    return 1 + len(begins) + any(isinstance(node, Checked) for node in nodes)


def needed_groups(groups: Mapping[int, list[Group]], outputs: Collection[int]) -> list[Group]:
    """The groups that the outputs need, depth first."""
    ordered: list[Group] = []
    done: set[int] = set()
    stack = [(index, False) for index in sorted(outputs, reverse=True) if index in groups]
    while stack:
        index, ready = stack.pop()
        if index in done:
            continue
        if ready:
            done.add(index)
            ordered += groups[index]
            continue
        stack.append((index, True))
        pending = {i for part in groups[index] for i in _needs(part) if i in groups} - done - {index}
        stack.extend((i, False) for i in sorted(pending, reverse=True))
    return ordered


def _needs(group: Group) -> set[int]:
    """Tensors that must be in memory before a group runs: what it reads, and what it changes a part of."""
    needed = set(group.reads())
    if isinstance(group.output.source, Scatter):
        needed |= {group.output.source.into.tensor, group.output.index}
    return needed
