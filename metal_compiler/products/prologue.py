"""Matrix-vector kernels: how simdgroups share rows, and vectors, such as a norm's result, that they compute first."""

from __future__ import annotations

from metal_compiler.dialect import METAL
from metal_compiler.row_phases import phase_extents, phases_text
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import flops_of, row_operands, row_program
from npu_compiler.lowering.problems.forms import Computed, is_vector
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import Prologue

__all__ = ["loads_vector", "row_groups", "vector_prologue"]

_SIMDGROUP_SUMS = 4  # that a simdgroup computes at a time
_SIMDGROUPS, _PROLOGUE_SIMDGROUPS = 4, 8  # of a threadgroup, and of one that computes the vector
_PROLOGUE_ROUNDS = 2  # so that computing the vector once for each threadgroup costs little beside reading the matrix
_CAPACITIES = (4096, 8192, 16384, 24576)  # bytes for the vector, of the 32 KiB that a threadgroup has
_PREFIX = "v"


def loads_vector(group: Group, position: int, operand: Operand) -> bool:
    """Whether an operand is the one row of a product whose matrix `matvec.metal` reads, and fits threadgroup memory."""
    return is_vector(operand, group.problem, position, _CAPACITIES[-1])


def row_groups(outputs: int, *, is_computed: bool) -> tuple[int, dict[str, object]]:
    """Threadgroups for so many rows of a matrix, which compute the vector first or not, and what the file is told."""
    simdgroups, rounds = (_PROLOGUE_SIMDGROUPS, _PROLOGUE_ROUNDS) if is_computed else (_SIMDGROUPS, 1)
    return ceil_div(outputs, simdgroups * rounds * _SIMDGROUP_SUMS), {"SIMDGROUPS": simdgroups, "ROUNDS": rounds}


def vector_prologue(operand: Computed, lowering: Lowering) -> Prologue:
    """The prologue that computes an operand of a group's product, one row, into threadgroup memory ``x``.

    Raises:
        OpRefusal: A row kernel of this expression does not lower either.
    """
    vector, k, size = operand.row, operand.shape[-1], operand.dtype.size
    operands = row_operands(vector, lowering.tensors, (*("0" for _ in operand.shape[:-1]), "c"), _PREFIX)
    program = row_program(vector, operands, METAL, hoisting=False)
    statements = [
        phases_text(program, 32 * _PROLOGUE_SIMDGROUPS),
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
