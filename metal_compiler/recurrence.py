"""Lowers recurrent layers: a launch for each step."""

from __future__ import annotations

from metal_compiler.dialect import METAL
from metal_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.integers import ceil_div
from npu_compiler.lowering import recurrence_steps as shared
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.recurrence import Recurrence
from npu_compiler.lowering.target import Lowering, lowering_of

__all__ = ["RECURRENCE_STEP", "lower_recurrence"]

_SIMDGROUPS = 4
RECURRENCE_STEP = shared.step_template("recurrence_step", f"{shared.MACROS} SIMDGROUPS", 32 * _SIMDGROUPS)


@lowering_of(Recurrence)
def lower_recurrence(problem: Recurrence, group: Group, lowering: Lowering) -> tuple[KernelCall, ...]:
    """A simdgroup computes a unit for some rows of the batch.

    Raises:
        OpRefusal: Operands differ in their data types.
    """
    shared.check_dtypes(problem)
    macros = {
        **shared.macros(problem),
        "a_t": METAL.storage[problem.result.dtype.name],
        "SIMDGROUPS": _SIMDGROUPS,
    }
    grid = ceil_div(problem.hidden, _SIMDGROUPS), ceil_div(problem.batch, shared.rows(problem)), problem.directions
    return shared.step_calls(RECURRENCE_STEP, (macros, grid), KERNELS, problem, group, lowering)
