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
from npu_compiler.lowering.schedule import Dataflow
from npu_compiler.lowering.value import MAX_READS
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
    flow, result = Dataflow(groups, outputs), dict(groups)
    for group in flow.needed:
        if group.problem is None:
            continue
        current, nodes = _with_codes(group, flow, tensors, loads)
        assert current.problem is not None
        for position, operand in enumerate(current.problem.operands):
            made = flow.private_maker(operand.tensor.index, group) if type(operand) is Operand else None
            forms = () if made is None else _forms(operand, made, flow, position, tensors)
            form = next((form for form in forms if loads(current, position, form)), None)
            if made is None or form is None:
                continue
            current, taken = current.loading(position, form), [made.output.index]
            nodes += made.nodes
            fresh = _with_fresh(form, flow, tensors)
            if fresh is not None and loads(current, position, fresh[0]):
                current = current.loading(position, fresh[0])
                nodes += fresh[1]
                taken += fresh[2]
            for index in taken:
                del result[index]
        if nodes:
            result[group.output.index] = [current.after(nodes)]
    return result


def _with_fresh(
    form: Operand, flow: Dataflow, tensors: Sequence[TracedTensor]
) -> tuple[Operand, tuple[str, ...], Sequence[int]] | None:
    """A form with what is new among its rows, the nodes that write this, and the tensors whose groups it replaces; None
    where nothing is new.
    """
    if is_coded(form):
        rounded = with_fresh_codes(form, flow)
        if rounded is None:
            return None
        coded, taken = rounded
        assert coded.fresh is not None
        if isinstance(coded, CodedPages) and not are_coded_rows(coded, tensors):
            return None
        return coded, coded.fresh.nodes, taken
    writer = flow.maker(form.tensor.index) if flow.readers[form.tensor.index] == 1 else None
    fresh = None if writer is None else with_fresh_rows(form, writer, tensors)
    return None if writer is None or fresh is None else (fresh, writer.nodes, [writer.output.index])


def _with_codes(group: Group, flow: Dataflow, tensors: Sequence[TracedTensor], loads: Loads) -> tuple[Group, list[str]]:
    """The group with operands loaded as codes, whoever else reads what these are made into; and the nodes it covers so.

    They come first: where a matrix lies as it is stored decides what a kernel can compute ahead of the product.
    """
    nodes: list[str] = []
    if not isinstance(group.problem, Product):
        return group, nodes
    both = _with_both_codes(group, group.problem, flow, tensors, loads)
    if both is not None:
        return both
    for position, operand in enumerate(group.problem.operands):
        made = _computed(operand, flow)
        if made is None:
            continue
        grouped = as_grouped_codes(made, position, tensors)
        if grouped is not None and loads(group, position, grouped):
            loading = group.loading(position, grouped)
            if len(loading.reads()) <= MAX_READS:
                group, nodes = loading, [*nodes, *made.made.nodes]
                continue
        codes = as_codes(made, position, tensors)
        scaled = with_scale_behind(group, position, codes) if codes and loads(group, position, codes) else None
        if scaled is not None:
            group, nodes = scaled, [*nodes, *made.made.nodes]
    return group, nodes


def _with_both_codes(
    group: Group, product: Product, flow: Dataflow, tensors: Sequence[TracedTensor], loads: Loads
) -> tuple[Group, list[str]] | None:
    """The same for a product of codes by codes, if the target multiplies these; it is asked for the right matrix, a
    weight, first.
    """
    nodes: list[str] = []
    for position, operand in reversed([*enumerate(product.operands)]):
        made = _computed(operand, flow)
        codes = None if made is None else as_codes(made, position, tensors)
        scaled = with_scale_behind(group, position, codes) if codes and loads(group, position, codes) else None
        if made is None or scaled is None:
            return None
        group, nodes = scaled, [*nodes, *made.made.nodes]
    return group, nodes


def _computed(operand: Operand, flow: Dataflow) -> Computed | None:
    """An operand as what computes it, whoever else reads that."""
    made = flow.maker(operand.tensor.index)
    form = None if made is None else _form(operand, made, False)
    return form if isinstance(form, Computed) else None


def _forms(
    operand: Operand, made: Group, flow: Dataflow, position: int, tensors: Sequence[TracedTensor]
) -> Iterator[Operand]:
    """The forms of an operand that a group makes, the best ones first."""
    is_output = made.output.index in flow.outputs
    pages = None if is_output else as_pages(operand, made, position, tensors)
    if pages is not None:
        yield pages
    form = _form(operand, made, is_output)
    coded = as_coded_rows(form, position, tensors) if isinstance(form, Computed) else None
    if coded is not None:
        yield coded
    if form is not None:
        yield form


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
