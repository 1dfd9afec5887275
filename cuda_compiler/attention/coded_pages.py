"""Keys and values in pages of codes of a byte, with pages of scales beside them, which attention reads as they are."""

from __future__ import annotations

from collections.abc import Mapping

from cuda_compiler.attention.codes import CODE_NUMBER_MACROS, are_fitting_codes, code_number_macros
from cuda_compiler.attention.sizes import PIECE
from cuda_compiler.dialect import CUDA
from npu_compiler.artifact.plan import Argument
from npu_compiler.lowering.cache_codes import PAGE_SCALE_MACROS, scale_macros
from npu_compiler.lowering.paging import share_fresh_rows, without_unlike_pages
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import CodedPages

__all__ = ["PAGE_CODE_MACROS", "are_coded_pages", "loads_coded_pages", "page_code_macros", "scale_inputs"]
__all__ += ["suits_coded_pages"]

PAGE_CODE_MACROS = (
    f"{CODE_NUMBER_MACROS} k_scale_t v_scale_t K_SCALE_HEAD K_SCALE_ROW V_SCALE_HEAD V_SCALE_ROW {PAGE_SCALE_MACROS}"
)
"""What `page_code_macros` defines for a kernel's file."""

_MOST_ROWS = 128  # of the queries that share a head of keys: of more each tile would make numbers of the codes again


def are_coded_pages(problem: Attention) -> bool:
    """Whether keys and values are pages of codes."""
    return isinstance(problem.k, CodedPages) and isinstance(problem.v, CodedPages)


def loads_coded_pages(problem: Attention, operand: CodedPages) -> bool:
    """Whether kernels read pages of codes, and of scales side by side."""
    if problem.causal or problem.shared * problem.rows > _MOST_ROWS or not are_fitting_codes(operand):
        return False
    scale = operand.scale
    batch, head, row, step = scale.strides
    places = (scale.offset, batch, head, operand.scale_stride)
    # the scales of a piece are copied in chunks
    return (row, step) == (1, 0) and all(place % PIECE == 0 for place in places)


def suits_coded_pages(problem: Attention) -> bool:
    """Whether keys and values are pages of codes that lie alike, and what is new among them does too."""
    if not are_coded_pages(problem) or without_unlike_pages(problem):
        return False
    fresh = [operand.fresh for operand in (problem.k, problem.v) if isinstance(operand, CodedPages)]
    return not any(fresh) or (all(fresh) and share_fresh_rows(problem))


def page_code_macros(problem: Attention) -> Mapping[str, object]:
    """What a kernel's file is told of codes and scales; nothing where pages hold numbers."""
    k, v = problem.k, problem.v
    if not isinstance(k, CodedPages) or not isinstance(v, CodedPages):
        return {}
    macros = {**code_number_macros(k, v, problem.q.dtype), **scale_macros(k, v, CUDA)}
    return {name: value for name, value in macros.items() if not name.endswith("_SCALE_BATCH")}  # pages have none


def scale_inputs(problem: Attention) -> dict[str, Argument]:
    """The pools of the scales of keys and values in codes."""
    k, v = problem.k, problem.v
    if not isinstance(k, CodedPages) or not isinstance(v, CodedPages):
        return {}
    return {"k_scales": k.scale.argument, "v_scales": v.scale.argument}
