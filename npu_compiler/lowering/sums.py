"""Sums of anchors: where one anchor's result is added to another's, a kernel may compute both in one accumulator.

So ends the first block of a stage of a residual network: ``relu(conv(a, w) + bias + (conv(b, v) + other))``, where the
second convolution brings the shortcut to the right shape. Its result never goes to memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import reduce

from npu_compiler.lowering.grouping import Group, Loads
from npu_compiler.lowering.problems.problem import Added
from npu_compiler.lowering.schedule import Dataflow
from npu_compiler.records import changed
from npu_compiler.tensor.expr import Call, Expr, Load, children, leaves, substitute, walk
from npu_compiler.tensor.trace import TracedTensor

__all__ = ["with_added_anchors"]


def with_added_anchors(
    groups: Mapping[int, list[Group]], outputs: Collection[int], loads: Loads
) -> dict[int, list[Group]]:
    """Computes an anchor whose result is only added to another's in the other's kernel, where the target can.

    Args:
        groups: What computes each tensor.
        outputs: Tensors that must be stored all the same.
        loads: Whether a group's launches can load an operand of a form.
    """
    flow, result = Dataflow(groups, outputs), dict(groups)
    for group in flow.needed:
        if group.anchor is not None:
            result[group.output.index] = [_with_added(group, group.anchor, flow, loads)]
    return result


def _with_added(group: Group, anchor: TracedTensor, flow: Dataflow, loads: Loads) -> Group:
    for load in leaves(group.expr):
        index = load.ref.tensor
        made = None if index == anchor.index or index in flow.outputs else flow.private_maker(index, group)
        if made is None or made.problem is None or group.problem is None or not _fits(group, made, load):
            continue
        expr, operand = _sum_of_both(group, made, load), Added(made.output, load.ref, made.problem)
        if expr is not None and loads(group, len(group.problem.operands), operand):
            return changed(group, expr=expr, added=operand).after(made.nodes)
    return group


def _fits(group: Group, other: Group, load: Load) -> bool:
    """Whether `group` reads the result of `other` at its own positions, and both have no pairs and stored operands."""
    stored = all(part.problem is not None and part.problem.is_stored for part in (group, other))
    plain = stored and group.pairs == other.pairs == 1 and other.index is None
    same = other.shape == group.shape and load.ref.view.same_elements(other.view) and load.index is None
    return plain and same and other.added is None


def _sum_of_both(group: Group, other: Group, load: Load) -> Expr | None:
    """The expression of `group` when its problem's result already contains that of `other`'s problem.

    Args:
        group: Computes ``f(own + load + terms)``.
        other: Computes ``added + rest``, for the load.
        load: The load of `other`'s result in `group`.

    Returns:
        ``f(own + terms + rest)``, or None where either is no such sum.
    """
    own, added = _only_load(group), _only_load(other)
    if own is None or added is None or sum(leaf.ref.tensor == load.ref.tensor for leaf in leaves(group.expr)) != 1:
        return None
    terms, rest = _terms_of_sum(group.expr, (own, load)), _terms_of_sum(other.expr, (added,))
    if terms is None or rest is None:
        return None
    place, kept = terms
    total = reduce(lambda a, b: Call("add", (a, b), place.dtype), [own, *kept, *rest[1]])
    return substitute(group.expr, lambda node: total if node is place else None)


def _only_load(group: Group) -> Load | None:
    """The group's load of its own problem's result; None where there are several."""
    assert group.anchor is not None
    found = [load for load in leaves(group.expr) if load.ref.tensor == group.anchor.index]
    return found[0] if len(found) == 1 else None


def _terms_of_sum(expr: Expr, wanted: Sequence[Load]) -> tuple[Expr, list[Expr]] | None:
    """The smallest sum in `expr` with all `wanted` loads among its terms, and its other terms.

    None where there is none, or a wanted load has a second use.
    """
    uses = Counter(child for node in walk(expr) for child in children(node))
    if any(uses[load] > 1 for load in wanted):
        return None
    for node in reversed(walk(expr)):
        terms = _terms(node, uses)
        if all(load in terms for load in wanted):
            return node, [term for term in terms if term not in wanted]
    return None


def _terms(node: Expr, uses: Mapping[Expr, int]) -> list[Expr]:
    """The terms of the sum that a node is; a partial sum with a second use counts as one term."""
    terms: list[Expr] = []
    stack = [node]
    while stack:
        part = stack.pop()
        if isinstance(part, Call) and part.fn == "add" and (part is node or uses[part] == 1):
            stack.extend(reversed(part.args))
        else:
            terms.append(part)
    return terms
