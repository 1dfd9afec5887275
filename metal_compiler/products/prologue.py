"""The prologue of a matrix-vector kernel: the vector, such as a norm's result, is computed by each threadgroup."""

from __future__ import annotations

from metal_compiler.dialect import METAL
from metal_compiler.row_phases import phase_extents, phases_text
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of, row_operands, row_program
from npu_compiler.lowering.problems.forms import Computed, is_vector
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue

__all__ = ["PROLOGUE_SIMDGROUPS", "loads_vector", "vector_prologue"]

PROLOGUE_SIMDGROUPS = 8
_CAPACITIES = (4096, 8192, 16384, 24576)  # bytes for the vector, of the 32 KiB that a threadgroup has
_PREFIX = "v"


def loads_vector(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is the one row of a product whose matrix `matvec.metal` reads, and fits threadgroup memory."""
    return is_vector(operand, group.problem, position, _CAPACITIES[-1])


def vector_prologue(operand: Computed, lowering: Lowering) -> Prologue:
    """The prologue that computes an operand of a group's product, one row, into threadgroup memory ``x``.

    Raises:
        OpRefusal: A row kernel of this expression does not lower either.
    """
    vector, k, size = operand.row, operand.shape[-1], operand.dtype.size
    operands = row_operands(vector, lowering.tensors, (*("0" for _ in operand.shape[:-1]), "c"), _PREFIX)
    program = row_program(vector, operands, METAL, hoisting=False)
    statements = [
        phases_text(program, 32 * PROLOGUE_SIMDGROUPS),
        "for (int c = lane; c < p.k; c += ROW_THREADS) {",
        program.body,
        f"x[c] = vector_t({program.value}); }}",
    ]
    macros = {
        "PROLOGUE": 1,
        "COMPUTE_VECTOR": " ".join(" ".join(statements).split()),
        "VECTOR_CAPACITY": next(most for most in _CAPACITIES if k * size <= most) // size,
    }
    return Prologue((operands,), phase_extents(program), macros, flops=flops_of([operand.expr], k))
