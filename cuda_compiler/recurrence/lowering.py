"""Lowers recurrent layers: a launch for all steps where a cluster can hold the weights, and a launch for each step."""

from __future__ import annotations

from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.dialect import CUDA
from cuda_compiler.recurrence.cluster import RecurrenceCosts, divide, lower_cluster
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import Argument, CallOption, KernelCall, Step, choice_of
from npu_compiler.dtypes import FLOAT32
from npu_compiler.integers import ceil_div
from npu_compiler.lowering import recurrence_steps as shared
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import output_argument, traffic_of
from npu_compiler.lowering.problems.recurrence import Recurrence
from npu_compiler.lowering.target import Lowering, lowering_of
from npu_compiler.lowering.templates import KernelTemplate, Launch

__all__ = ["RECURRENCE_STEP", "lower_recurrence"]

_WARPS = 4
RECURRENCE_STEP = KernelTemplate(
    "recurrence_step",
    params=shared.PARAMS,
    macros=f"{shared.MACROS} WARPS",
    inputs=shared.INPUTS,
    outputs=shared.OUTPUTS,
    threads=32 * _WARPS,
    files="recurrence_cell.cuh",
)


@lowering_of(Recurrence)
def lower_recurrence(problem: Recurrence, group: Group, lowering: Lowering) -> list[Step]:
    """The launches.

    Raises:
        OpRefusal: Operands differ in their data types.
    """
    shared.check_dtypes(problem)
    options = [CallOption("", _lower_steps(problem, group, lowering))]
    division = divide(problem, lowering.device)
    if division is not None and division.microseconds(lowering.device) < _steps_microseconds(problem, lowering.device):
        options.insert(0, CallOption(CLUSTERS, (lower_cluster(division, group, lowering),)))
    return [*choice_of(options)]


def _lower_steps(problem: Recurrence, group: Group, lowering: Lowering) -> tuple[KernelCall, ...]:
    """A launch for each step, in which a warp computes a unit for some rows of the batch."""
    kept = Argument(lowering.scratch(problem.states * FLOAT32.size), writes=True)
    macros = {**shared.macros(problem), "a_t": CUDA.storage[problem.result.dtype.name], "WARPS": _WARPS}
    nbytes = traffic_of(group, lowering.tensors) // problem.steps
    calls = []
    for step in range(problem.steps):
        launch = Launch(
            RECURRENCE_STEP,
            grid=(ceil_div(problem.hidden, _WARPS), ceil_div(problem.batch, shared.rows(problem)), problem.directions),
            values=shared.values(problem, step),
            macros=macros,
            inputs=shared.bindings(problem),
            outputs={"out": output_argument(group), "kept": kept},
            flops=problem.flops // problem.steps,
        )
        calls.append(KERNELS.launch_alone(launch, " + ".join(group.nodes), nbytes, lowering))
    return tuple(calls)


def _steps_microseconds(problem: Recurrence, device: DeviceModel) -> float:
    """What a launch for each step takes: weights come from the last cache for each tile of the batch."""
    reads = ceil_div(problem.batch, shared.rows(problem)) * problem.directions
    nbytes = problem.cell.gates * problem.hidden**2 * problem.result.dtype.size * reads
    return problem.steps * (device.constants("recurrence", RecurrenceCosts).launch + nbytes / device.cache_gbs / 1000)
