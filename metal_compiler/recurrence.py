"""Lowers recurrent layers: a launch for each step."""

from __future__ import annotations

from metal_compiler.dialect import METAL
from metal_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering import recurrence_steps as shared
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import output_argument, traffic_of
from npu_compiler.lowering.problems.recurrence import Recurrence
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["RECURRENCE_STEP", "lower_recurrence"]

_SIMDGROUPS = 4
RECURRENCE_STEP = KernelTemplate(
    "recurrence_step",
    params=shared.PARAMS,
    macros=f"{shared.MACROS} SIMDGROUPS",
    inputs=shared.INPUTS,
    outputs=shared.OUTPUTS,
    threads=32 * _SIMDGROUPS,
)


@lowering_of(Recurrence)
def lower_recurrence(problem: Recurrence, group: Group, lowering: Lowering) -> list[KernelCall]:
    """A simdgroup computes a unit for some rows of the batch.

    Raises:
        OpRefusal: Operands differ in their data types.
    """
    shared.check_dtypes(problem)
    kept = Argument(lowering.scratch(problem.states * FLOAT32.size), writes=True)
    macros = {
        **shared.macros(problem),
        "a_t": METAL.storage[problem.result.dtype.name],
        "SIMDGROUPS": _SIMDGROUPS,
    }
    calls = []
    for step in range(problem.steps):
        launch = Launch(
            RECURRENCE_STEP,
            grid=(
                ceil_div(problem.hidden, _SIMDGROUPS),
                ceil_div(problem.batch, shared.rows(problem)),
                problem.directions,
            ),
            values=shared.values(problem, step),
            macros=macros,
            inputs=shared.bindings(problem),
            outputs={"out": output_argument(group), "kept": kept},
            flops=problem.flops // problem.steps,
        )
        nbytes = traffic_of(group, lowering.tensors) // problem.steps
        calls.append(KERNELS.launch_alone(launch, " + ".join(group.nodes), nbytes, lowering))
    return calls
