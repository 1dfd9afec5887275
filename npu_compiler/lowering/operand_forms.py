"""Operands that are made where they are read: a problem's launches may compute, or scatter, what only they look at.

So a product of one row computes the norm ahead of it, and a decode step rotates its queries and writes its cache inside
of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod

from npu_compiler.ir import TensorSpec
from npu_compiler.lowering.cache_codes import is_coded
from npu_compiler.lowering.dequantisation import as_coded_rows, as_codes, with_scale_behind
from npu_compiler.lowering.fresh_codes import with_fresh_codes
from npu_compiler.lowering.grouped_codes import as_grouped_codes
from npu_compiler.lowering.grouping import Group, Loads, takes_pairs
from npu_compiler.lowering.paging import are_coded_rows, as_pages, with_fresh_rows
from npu_compiler.lowering.problems.forms import CodedPages, Computed, Scattered
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.product import Product
from npu_compiler.lowering.row_alignment import realign_rows
from npu_compiler.lowering.schedule import needed_groups, readers_of
from npu_compiler.lowering.value import MAX_READS
from npu_compiler.records import changed
from npu_compiler.tensor.expr import Expr, reindex
from npu_compiler.tensor.symbolic import Trace
from npu_compiler.tensor.trace import LayoutRule, TracedTensor

__all__ = ["pairs_columns", "with_operand_forms"]


def pairs_columns(layouts: LayoutRule, loads: Loads) -> Callable[[TensorSpec, TensorSpec], bool]:
    """The question whether the epilogue of a linear can combine two neighbouring columns, given input and weight.

    Args:
        layouts: How the target lays out tensors.
        loads: See `with_operand_forms`.
    """

    def asked(input: TensorSpec, weight: TensorSpec) -> bool:
        trace = Trace(layouts)
        rows, columns = prod(input.shape[:-1]), weight.shape[0]
        x = trace.add(input.name, (rows, input.shape[-1]), input.dtype, "plain")
        w = trace.add(weight.name, weight.shape, weight.dtype, "plain")
        trace.anchor("matmul", (x, w.swap(0, 1)), (rows, columns), input.dtype)
        return takes_pairs(trace.tensors[-1], trace.tensors, loads)

    return asked


def with_operand_forms(
    groups: Mapping[int, list[Group]], tensors: Sequence[TracedTensor], outputs: Collection[int], loads: Loads
) -> dict[int, list[Group]]:
    """Makes operands of problems where these are computed, if nobody else reads them and the target can.

    A scatter may be an output at the same time: its launch has then run before the function ends, as it would have.

    Args:
        groups: What computes each tensor.
        tensors: The trace's tensors.
        outputs: Tensors that must be stored all the same.
        loads: Whether a group's launches can load an operand of a form.
    """
    readers = readers_of(groups, outputs)
    result = dict(groups)
    for group in needed_groups(groups, outputs):
        if group.problem is None:
            continue
        current, nodes = _with_codes(group, groups, tensors, loads)
        assert current.problem is not None
        for position, operand in enumerate(current.problem.operands):
            index = operand.tensor.index
            makers = groups.get(index, [])
            is_alone = readers.get(index) == 1 and group.times_read(index) == 1
            if type(operand) is not Operand or not is_alone or len(makers) != 1:
                continue
            forms = _forms(operand, makers[0], index in outputs, position, tensors)
            form = next((form for form in forms if loads(current, position, form)), None)
            if form is None:
                continue
            current = _loading(current, position, form)
            nodes += makers[0].nodes
            del result[index]
            fresh = _with_fresh(form, groups, readers, outputs, tensors)
            if fresh is not None and loads(current, position, fresh[0]):
                current = _loading(current, position, fresh[0])
                nodes += fresh[1]
                for taken in fresh[2]:
                    del result[taken]
        if nodes:
            result[group.output.index] = [changed(current, nodes=tuple(dict.fromkeys((*nodes, *group.nodes))))]
    return result


def _loading(group: Group, position: int, operand: Operand) -> Group:
    """The group with another form of an operand."""
    assert group.problem is not None
    return changed(group, problem=group.problem.with_operand(position, operand))


def _with_fresh(
    form: Operand,
    groups: Mapping[int, list[Group]],
    readers: Mapping[int, int],
    outputs: Collection[int],
    tensors: Sequence[TracedTensor],
) -> tuple[Operand, tuple[str, ...], Sequence[int]] | None:
    """A form with what is new among its rows, the nodes that write this, and the tensors whose groups it replaces; None
    where nothing is new.
    """
    if is_coded(form):
        rounded = with_fresh_codes(form, groups, readers, outputs)
        if rounded is None:
            return None
        coded, taken = rounded
        assert coded.fresh is not None
        if isinstance(coded, CodedPages) and not are_coded_rows(coded, tensors):
            return None
        return coded, coded.fresh.nodes, taken
    pool = form.tensor.index
    writers = groups.get(pool, [])
    fresh = with_fresh_rows(form, writers[0], tensors) if len(writers) == readers.get(pool) == 1 else None
    return None if fresh is None else (fresh, writers[0].nodes, [pool])


def _with_codes(
    group: Group, groups: Mapping[int, list[Group]], tensors: Sequence[TracedTensor], loads: Loads
) -> tuple[Group, list[str]]:
    """The group with operands loaded as codes, whoever else reads what these are made into; and the nodes it covers so.

    They come first: where a matrix lies as it is stored decides what a kernel can compute ahead of the product.
    """
    operands = group.problem.operands if isinstance(group.problem, Product) else ()
    both = _with_both_codes(group, groups, tensors, loads) if len(operands) == 2 else None
    if both is not None:
        return both
    nodes: list[str] = []
    for position, operand in enumerate(operands):
        makers = groups.get(operand.tensor.index, [])
        made = _form(operand, makers[0], False) if len(makers) == 1 else None
        if not isinstance(made, Computed) or group.problem is None:
            continue
        grouped = as_grouped_codes(made, position, tensors)
        if grouped is not None and loads(group, position, grouped):
            loading = _loading(group, position, grouped)
            if len(loading.reads()) <= MAX_READS:
                group, nodes = loading, [*nodes, *makers[0].nodes]
                continue
        codes = as_codes(made, position, tensors)
        if codes is not None and loads(group, position, codes):
            scaled = with_scale_behind(group, position, codes)
            group, nodes = (group, nodes) if scaled is None else (scaled, [*nodes, *makers[0].nodes])
    return group, nodes


def _forms(
    operand: Operand, made: Group, is_output: bool, position: int, tensors: Sequence[TracedTensor]
) -> Iterator[Operand]:
    """The forms of an operand that a group makes, the best ones first."""
    pages = None if is_output else as_pages(operand, made, position, tensors)
    if pages is not None:
        yield pages
    form = _form(operand, made, is_output)
    coded = as_coded_rows(form, position, tensors) if isinstance(form, Computed) else None
    if coded is not None:
        yield coded
    if form is not None:
        yield form


def _with_both_codes(
    group: Group, groups: Mapping[int, list[Group]], tensors: Sequence[TracedTensor], loads: Loads
) -> tuple[Group, list[str]] | None:
    """The same for a product of codes by codes, if the target multiplies these; it is asked for the right matrix, a
    weight, first.
    """
    assert group.problem is not None
    nodes: list[str] = []
    for position, operand in reversed([*enumerate(group.problem.operands)]):
        makers = groups.get(operand.tensor.index, [])
        made = _form(operand, makers[0], False) if len(makers) == 1 else None
        codes = as_codes(made, position, tensors) if isinstance(made, Computed) else None
        if codes is None or not loads(group, position, codes):
            return None
        scaled = with_scale_behind(group, position, codes)
        if scaled is None:
            return None
        group, nodes = scaled, [*nodes, *makers[0].nodes]
    return group, nodes


def _form(operand: Operand, made: Group, is_output: bool) -> Operand | None:
    """The form of an operand that a group makes; None where it has to be in memory."""
    if made.index is not None:
        return Scattered(operand.tensor, operand.ref, made) if made.is_elementwise else None
    expr = None if is_output or made.problem is not None else _seen(operand, made)
    return None if expr is None else Computed(operand.tensor, operand.ref, expr, made)


def _seen(operand: Operand, made: Group) -> Expr | None:
    """What a group computes, as the reader of an operand sees it."""
    if made.is_elementwise and made.shape == made.output.shape:
        seen = reindex(made.expr, made.shape, operand.ref.steps)
        if seen is not None:
            return seen
    shape = operand.shape
    in_order = made.output.view.reshape(shape)
    if in_order is None or not in_order.same_elements(operand.view) or made.shape[-1:] != shape[-1:]:
        return None
    return realign_rows(made.expr, made.shape[:-1], shape[:-1])
