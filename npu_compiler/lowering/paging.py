"""Attention whose keys and values lie in pages: which expressions are a gather of whole pages through a table.

Kernels read the pages where they lie. What is gathered is never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_compiler.lowering.anchors import pointer_arguments, pointer_parameters
from npu_compiler.lowering.dequantisation import coded_parts
from npu_compiler.lowering.dialect import Dialect
from npu_compiler.lowering.element import element_function
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import CodedPages, InPages, Paged
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue
from npu_compiler.tensor.expr import Call, Checked, Const, Expr, Load, Ref, moves, reindex, substitute, varies
from npu_compiler.tensor.intervals import interval, view_bounds
from npu_compiler.tensor.trace import Scatter, TracedTensor
from npu_compiler.tensor.view import Step, View

__all__ = ["PAGE_MACROS", "are_coded_rows", "as_pages", "page_prologues", "share_fresh_rows", "with_fresh_rows"]
__all__ += ["fresh_rows", "unnumbered", "without_unlike_pages"]

_TABLE = (0, 2)  # the dimensions of [batch, groups, pages, positions, size] that a table has


def as_pages(operand: Operand, made: Group, position: int, tensors: Sequence[TracedTensor]) -> InPages | None:
    """Keys or values of attention as pages, where what makes them only looks these up in a table, or makes numbers of
    the codes and scales that it looks up; else None.

    Args:
        operand: The operand, [batch, groups, length, size].
        made: What computes its tensor: the pages [batch, groups, pages, positions, size], if it is to be `InPages`.
        position: Which operand: 1 for keys, 2 for values.
        tensors: The trace's tensors.
    """
    copied = Operand(operand.tensor, operand.ref)
    if position not in (1, 2) or made.problem is not None or made.index is not None:
        return None
    if len(made.shape) != 5 or made.shape != made.output.view.shape or 0 in made.shape:
        return None
    order = (
        (0, 2, 1, 3, 4) if operand.shape[1] == made.shape[2] == 1 else tuple(range(5))
    )  # of one head pages come first
    expr, whole = reindex(made.expr, made.shape, (("permute", order),)), made.output.view.permute(order)
    batch, groups, pages, size, width = whole.shape
    seen = whole.reshape((batch, groups, pages * size, width))
    if expr is None or seen is None or not seen.same_elements(operand.view):
        return None
    if isinstance(expr, Load):
        pool = _pool_of(expr, whole.shape, operand.shape, tensors)
        return None if pool is None else Paged(*pool.rows, size, pool.stride, pool.table, copied, made)
    parts = coded_parts(expr, whole.shape)
    if parts is None:
        return None
    kind, code, scale = parts
    codes, scales = (_pool_of(load, whole.shape, operand.shape, tensors) for load in (code, scale))
    if codes is None or scales is None or unnumbered(codes.table) != unnumbered(scales.table):
        return None
    at = (*codes.rows, size, codes.stride, codes.table, copied, made)
    return CodedPages(*at, kind, Operand(*scales.rows), scales.stride)


@dataclass(frozen=True)
class _Pool:
    """Where a table's pages lie.

    Attributes:
        rows: The pool, and how the rows of a page lie in it.
        stride: Elements from one page to the next.
        table: The page of an element of the batch at each `page` positions.
    """

    rows: tuple[TracedTensor, Ref]
    stride: int
    table: Expr


def _pool_of(
    load: Load, made: tuple[int, ...], shape: tuple[int, ...], tensors: Sequence[TracedTensor]
) -> _Pool | None:
    """What a load looks up in pages, where it does; over the shape of what is made, and that of the operand."""
    if load.index is None or load.index_stride < 1:
        return None
    table, elements, pool = _over_table(load.index, made), load.ref.view.expand(made), tensors[load.ref.tensor]
    if table is None or moves(load, made, _TABLE) or not _is_inside(load, elements, pool):
        return None
    _, head, _, row, step = elements.strides
    ref = Ref(pool.index, View(shape, (0, head, row, step), elements.offset))
    return _Pool((pool, ref), load.index_stride, table)


def _over_table(index: Expr, shape: tuple[int, ...]) -> Expr | None:
    """An index over [batch, groups, pages, positions, size] as one over [batch, pages]; None where more decides it."""
    others = [dim for dim in range(5) if dim not in _TABLE]
    if varies(index, shape, others):
        return None
    batch, _, pages, _, _ = shape
    first: tuple[Step, ...] = tuple(("slice", (dim, 0, 1, 1)) for dim in others)
    return reindex(index, shape, (*first, ("reshape", (batch, pages))))


def _is_inside(load: Load, elements: View, pool: TracedTensor) -> bool:
    """Whether all that is looked up lies in the pool, whatever the table holds."""
    assert load.index is not None
    bounds, (low, high) = interval(load.index), view_bounds(elements)
    if bounds is None or min(low, bounds[0]) < 0:
        return False
    return high + bounds[1] * load.index_stride < pool.layout.size


def _share_table(problem: Attention) -> bool:
    """Whether keys and values lie in the same pages of two pools that are divided alike, in one form."""
    k, v = problem.k, problem.v
    if not isinstance(k, InPages) or not isinstance(v, InPages) or type(k) is not type(v):
        return False
    if isinstance(k, CodedPages) and isinstance(v, CodedPages) and k.kind != v.kind:
        return False
    return k.page == v.page and unnumbered(k.table) == unnumbered(v.table)


def unnumbered(table: Expr) -> Expr:
    """A table whose checks have no numbers, and whose loads forget how they came about: what is looked up twice is the
    same index.
    """

    def plain(node: Expr) -> Expr | None:
        if isinstance(node, Checked):
            return replace(node, check=0)
        if not isinstance(node, Load) or node.index is not None:
            return None
        return Load(Ref(node.ref.tensor, node.ref.view), node.dtype)

    return substitute(table, plain)


def with_fresh_rows(operand: Operand, made: Group, tensors: Sequence[TracedTensor]) -> Paged | None:
    """Pages with the rows that a scatter puts there, where these are one row of all heads for each token; else None.

    Args:
        operand: What is read.
        made: What makes the pool: a scatter in place.
        tensors: The trace's tensors.
    """
    if not isinstance(operand, Paged) or not _are_rows_of_pages(made, operand, operand.page, operand.stride, tensors):
        return None
    return replace(operand, fresh=made)


def are_coded_rows(operand: CodedPages, tensors: Sequence[TracedTensor]) -> bool:
    """Whether new codes, and their scales, are one row of all heads of a page for each token."""
    fresh, page = operand.fresh, operand.page
    assert fresh is not None
    scale = Operand(operand.scale.tensor, operand.scale.ref.apply(("slice", (3, 0, 1, 1))) or operand.scale.ref)
    return _are_rows_of_pages(fresh.codes, operand, page, operand.stride, tensors) and _are_rows_of_pages(
        fresh.scales, scale, page, operand.scale_stride, tensors
    )


def _are_rows_of_pages(made: Group, pool: Operand, page: int, stride: int, tensors: Sequence[TracedTensor]) -> bool:
    """Whether a scatter puts one row of all heads for each token into pages, so many elements apart, of a pool that
    nothing else writes.
    """
    source = pool.tensor.source
    if made.index is None or not isinstance(source, Scatter):
        return False
    _, head, row, step = pool.strides
    _, groups, _, width = pool.shape
    rows = made.shape[1:] == (groups, width) and made.view.same_elements(View(made.shape, (0, head, step)))
    apart = pool.offset == 0 and stride % row == 0 and head == page * row
    if len(made.shape) != 3 or not rows or not apart or made.index_stride != row or not made.is_elementwise:
        return False
    return tensors[source.into.tensor].source is None and _names_pages(made, page, stride // row)


def _names_pages(made: Group, positions: int, step: int) -> bool:
    """Whether the index of a scatter is a page, times `step`, and a place in it, the same for all heads of a token."""
    index = made.index
    assert index is not None
    if varies(index, made.shape, (1, 2)):
        return False
    if isinstance(index, Call) and index.fn == "where" and index.args[1] == Const(-1, index.dtype):
        index = index.args[2]
    if not isinstance(index, Call) or index.fn != "add":
        return False
    page, place = index.args
    bounds = interval(place)
    scaled = isinstance(page, Call) and page.fn == "mul" and page.args[1] == Const(step, page.dtype)
    return scaled and bounds is not None and bounds[0] >= -1 and bounds[1] < positions


def share_fresh_rows(problem: Attention) -> bool:
    """Whether new keys and new values go to the same places."""
    k, v = (fresh_rows(operand) for operand in (problem.k, problem.v))
    if k is None or v is None or k.index is None or v.index is None:
        return False
    return k.shape[0] == v.shape[0] and unnumbered(k.index) == unnumbered(v.index)


def fresh_rows(operand: Operand) -> Group | None:
    """What stores the rows, or the codes, that are new among those in pages; None where nothing is."""
    if isinstance(operand, CodedPages):
        return None if operand.fresh is None else operand.fresh.codes
    return operand.fresh if isinstance(operand, Paged) else None


def without_unlike_pages(problem: Attention) -> list[Group]:
    """What gathers keys and values of pages, where these are not the same for both, as kernels expect; else nothing."""
    found = [operand for operand in (problem.k, problem.v) if isinstance(operand, InPages)]
    return [] if not found or _share_table(problem) else [operand.made for operand in found]


PAGE_MACROS = "PAGE? K_PAGE? V_PAGE? PAGE_ARGUMENTS?"
"""What `page_prologues` defines for a kernel's file."""


def page_prologues(problem: Attention, lowering: Lowering, dialect: Dialect) -> dict[str, Prologue]:
    """For keys and values in pages a function ``page_of``, given 0, 0, the element of the batch and which of its pages.

    The page is inside of the pools; one that is not is recorded as a fault. Launches bind what it reads as ``pages``.

    Args:
        problem: Keys and values in pages that share a table (`without_unlike_pages`), or neither.
        lowering: Where the trace's tensors are.
        dialect: The language.
    """
    k, v = problem.k, problem.v
    if not isinstance(k, InPages) or not isinstance(v, InPages):
        return {}
    found = element_function("page_of", k.table, (k.shape[0], k.pages), lowering.tensors, "t", dialect)
    macros: dict[str, object] = {"PAGE": k.page, "K_PAGE": k.stride, "V_PAGE": v.stride}
    macros["PAGE_ARGUMENTS"] = pointer_arguments(found.operands)
    text = found.text(pointer_parameters(found.operands, dialect), dialect)
    return {"pages": Prologue((found.operands,), macros=macros, text=text)}
