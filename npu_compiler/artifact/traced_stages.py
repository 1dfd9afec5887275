"""Tensors of a trace as stages of a recipe: expressions as they are, products and scans as reductions of whole rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from npu_compiler.artifact.stages import Stage, encoded
from npu_compiler.dtypes import BOOL, FLOAT32, INT64
from npu_compiler.tensor.expr import Call, Combination, Const, Expr, Iota, Load, Reduce, Slot, substitute
from npu_compiler.tensor.trace import Anchor, Map, TracedTensor
from npu_compiler.tensor.view import View

__all__ = ["needed_for", "stage_of"]


def needed_for(tensors: Sequence[TracedTensor], wanted: int) -> list[int]:
    """What a tensor of a trace is made of, and itself, in order."""
    found, stack = {wanted}, [wanted]
    while stack:
        for ref in tensors[stack.pop()].operands():
            if ref.tensor not in found:
                found.add(ref.tensor)
                stack.append(ref.tensor)
    return sorted(found)


def stage_of(tensor: TracedTensor, tensors: Sequence[TracedTensor], numbers: Mapping[int, int]) -> Stage | None:
    """The stage that makes a tensor of a trace; None where expressions cannot say it.

    Args:
        tensor: One that is computed.
        tensors: Those of its trace.
        numbers: By the index of a tensor in the trace its number in the recipe.
    """
    source = tensor.source
    if isinstance(source, Map):
        return encoded(source.expr, tensor.shape, tensor.dtype, numbers)
    if isinstance(source, Anchor) and source.kind == "matmul" and not source.attrs and tensor.dtype.is_float:
        return _product(tensor, source, tensors, numbers)
    if isinstance(source, Anchor) and source.kind == "scan":
        return _scan(tensor, source, tensors, numbers)
    return None


def _product(
    tensor: TracedTensor, anchor: Anchor, tensors: Sequence[TracedTensor], numbers: Mapping[int, int]
) -> Stage:
    """A product of matrices [..., M, K] and [..., K, N] as sums of a row [K] for each of its elements."""
    (*batch, rows, columns), extent = tensor.shape, anchor.operands[0].view.shape[-1]
    space = (*batch, rows, columns, extent)
    left, right = (ref.view for ref in anchor.operands)
    seen = (
        View(space, (*left.strides[:-1], 0, left.strides[-1]), left.offset),
        View(space, (*right.strides[:-2], 0, right.strides[-1], right.strides[-2]), right.offset),
    )
    factors = [
        Load(replace(ref, view=view, steps=()), tensors[ref.tensor].dtype)
        for ref, view in zip(anchor.operands, seen, strict=True)
    ]
    both = (Slot(0, FLOAT32), Slot(1, FLOAT32))
    total = Combination("total", both, (Const(0.0, FLOAT32),), (Call("add", both, FLOAT32),))
    summed = Reduce(total, (Call("mul", tuple(factors), FLOAT32),), extent, FLOAT32)
    return encoded(summed, (*tensor.shape, 1), tensor.dtype, numbers)


def _scan(tensor: TracedTensor, anchor: Anchor, tensors: Sequence[TracedTensor], numbers: Mapping[int, int]) -> Stage:
    """A reduction of each element [outer, length, inner] with all ahead of it, as one over all of its row."""
    (ref,), how = anchor.operands, anchor.attrs["combination"]
    outer, length, inner = tensor.shape
    space, (first, middle, last) = (outer, length, inner, length), ref.view.strides
    there = View(space, (first, 0, last, middle), ref.view.offset)
    element = Load(replace(ref, view=there, steps=()), tensors[ref.tensor].dtype)
    place, own = (Iota(View(space, strides), INT64) for strides in ((0, 0, 0, 1), (0, 1, 0, 0)))
    is_ahead = Call("le", (place, own), BOOL)
    lifted = [_with_slots(expr, (element, place)) for expr in anchor.attrs["lift"]]
    state = zip(lifted, how.identity, strict=True)
    args = tuple(Call("where", (is_ahead, expr, nothing), expr.dtype) for expr, nothing in state)
    made = [Reduce(how, args, length, nothing.dtype, item) for item, nothing in enumerate(how.identity)]
    return encoded(_with_slots(anchor.attrs["value"], made), (*tensor.shape, 1), tensor.dtype, numbers)


def _with_slots(expr: Expr, values: Sequence[Expr]) -> Expr:
    """An expression with a value for each of its slots."""
    return substitute(expr, lambda node: values[node.number] if isinstance(node, Slot) else None)
