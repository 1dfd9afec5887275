"""How attention kernels look up the pages that keys and values lie in."""

from __future__ import annotations

from dataclasses import replace

from cuda_compiler.dialect import CUDA
from cuda_compiler.early_launches import are_settled
from npu_compiler.lowering.anchors import pointer_parameters
from npu_compiler.lowering.paging import PAGE_MACROS as _MACROS
from npu_compiler.lowering.paging import page_prologues
from npu_compiler.lowering.problems.attention import Attention
from npu_compiler.lowering.problems.forms import InPages
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue

__all__ = ["PAGE_MACROS", "are_tables_settled", "pages"]

PAGE_MACROS = f"{_MACROS} PAGE_PARAMETERS?"
"""What `pages` defines for a kernel's file."""


def pages(problem: Attention, lowering: Lowering) -> dict[str, Prologue]:
    """As `page_prologues`; functions that call ``page_of`` take what it reads by ``PAGE_PARAMETERS``."""
    found = page_prologues(problem, lowering, CUDA)
    return {
        name: replace(
            prologue,
            macros={**prologue.macros, "PAGE_PARAMETERS": pointer_parameters(prologue.operands[0], CUDA)},
        )
        for name, prologue in found.items()
    }


def are_tables_settled(problem: Attention, lowering: Lowering) -> bool:
    """Whether pages can be looked up by the next launch before it waits for the one ahead."""
    tables = [operand.table for operand in (problem.k, problem.v) if isinstance(operand, InPages)]
    return are_settled(tables, lowering)
