"""Products of codes by codes: activations that become codes as they are computed, and stay codes up to the product.

Codes and then numbers of these, ahead of a product, round what it multiplies. Where a target multiplies codes as they
are, the codes go to memory instead of the numbers, and so do the scales of their rows, by which the product's epilogue
multiplies. One kernel computes both: what is ahead of them, a norm say, is in it. To other targets they are arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from npu_compiler.lowering.dequantisation import as_codes
from npu_compiler.lowering.grouping import Group, Loads
from npu_compiler.lowering.problems.build import problem_of
from npu_compiler.lowering.problems.forms import Computed, Dequantised
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.tensor.expr import Expr, Load, children, has_reduce, leaves, reindex, substitute
from npu_compiler.tensor.symbolic import Trace
from npu_compiler.tensor.trace import Anchor, Beside, Map, TracedTensor

__all__ = ["RowScales", "keep_codes", "with_scales_beside"]


@dataclass(frozen=True)
class RowScales:
    """Codes that stay in memory, and the scales of their rows.

    Attributes:
        codes: Index of the codes.
        scales: That of what computes the scales.
        stored: That of the tensor in which the kernel of the codes stores them.
    """

    codes: int
    scales: int
    stored: int


def keep_codes(trace: Trace, loads: Loads) -> list[RowScales]:
    """Finds activations whose codes a product reads as they are; these then read the scales where they are `stored`.

    Args:
        trace: The trace; tensors of numbers in it get other sources.
        loads: Whether a group's launches can load an operand of a form.
    """
    kept: dict[int, RowScales] = {}
    for tensor in list(trace.tensors):
        codes = _activation(tensor, trace.tensors, loads)
        scales = None if codes is None else _scales_of(codes, trace.tensors)
        if codes is None or scales is None:
            continue
        made = codes.tensor.index
        if made not in kept:
            kept[made] = RowScales(made, scales, _stored_beside(trace, codes.tensor, trace.tensors[scales]))
        numbers = tensor.source.operands[0].tensor if isinstance(tensor.source, Anchor) else -1
        _read_stored(trace, numbers, kept[made])
    return list(kept.values())


def _activation(result: TracedTensor, tensors: Sequence[TracedTensor], loads: Loads) -> Dequantised | None:
    """The left matrix of a product, as codes that kernels make, if a target multiplies them by the right one's."""
    if not isinstance(result.source, Anchor) or result.source.kind != Product.kind:
        return None
    problem = problem_of(result, tensors)
    assert isinstance(problem, Product)
    left, right = (_codes(operand, place, tensors) for place, operand in enumerate(problem.operands))
    if left is None or right is None or not isinstance(left.tensor.source, Map):
        return None
    alone = Group.of(problem)
    return left if loads(alone, 1, right) and loads(alone.loading(1, right), 0, left) else None


def _codes(operand: Operand, position: int, tensors: Sequence[TracedTensor]) -> Dequantised | None:
    made = operand.tensor
    if not isinstance(made.source, Map) or has_reduce(made.source.expr):
        return None
    expr = reindex(made.source.expr, made.shape, operand.ref.steps)
    group = Group(made, None, made.source.expr, made.shape, made.view, ())
    return None if expr is None else as_codes(Computed(made, operand.ref, expr, group), position, tensors)


def _scales_of(codes: Dequantised, tensors: Sequence[TracedTensor]) -> int | None:
    """The tensor of scales that both codes and numbers are made with, one for each row."""
    read = {load.ref.tensor for load in leaves(codes.scale)} if codes.scale is not None else set()
    made = codes.tensor.source
    if len(read) != 1 or not isinstance(made, Map):
        return None
    (index,) = read
    source = tensors[index].source
    shared = any(load.ref.tensor == index for load in leaves(made.expr))
    return index if shared and isinstance(source, Map) and has_reduce(source.expr) else None


def _stored_beside(trace: Trace, codes: TracedTensor, scales: TracedTensor) -> int:
    return trace.add(scales.name, scales.shape, scales.dtype, scales.role, Beside(codes.ref)).placed().tensor


def _read_stored(trace: Trace, numbers: int, scales: RowScales) -> None:
    """Lets a tensor of numbers be made with the scales where they are stored."""
    tensor = trace.tensors[numbers]
    assert isinstance(tensor.source, Map)

    def stored(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or node.ref.tensor != scales.scales:
            return None
        return replace(node, ref=replace(node.ref, tensor=scales.stored))

    trace.tensors[numbers] = replace(tensor, source=Map(substitute(tensor.source.expr, stored)))


def with_scales_beside(
    groups: Mapping[int, list[Group]], kept: Sequence[RowScales], tensors: Sequence[TracedTensor]
) -> dict[int, list[Group]]:
    """Groups of codes whose kernels store the scales of their rows as well; or copies of scales that are in memory."""
    result = dict(groups)
    for scales in kept:
        (group,), source = groups[scales.codes], tensors[scales.codes].source
        stored = tensors[scales.stored]
        assert isinstance(source, Map)
        made = _in_place_of(scales.scales, source.expr, group.expr)
        if made is not None and has_reduce(made):
            result[scales.codes] = [replace(group, beside=(stored, made))]
        else:
            whole = tensors[scales.scales].load
            result[scales.stored] = [Group(stored, None, whole, stored.shape, stored.view, group.nodes)]
    return result


def _in_place_of(tensor: int, before: Expr, after: Expr) -> Expr | None:
    """What stands in an expression where another one, of which it was made, loads a tensor."""
    stack = [(before, after)]
    while stack:
        was, now = stack.pop()
        if isinstance(was, Load) and was.ref.tensor == tensor:
            return now
        stack += zip(children(was), children(now), strict=False)
    return None
