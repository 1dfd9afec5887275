"""Lowers recurrent layers: a launch for all steps where a cluster can hold the weights, and a launch for each step.

Tensor cores take the steps where rows of weights and h have whole chunks.
"""

from __future__ import annotations

from cuda_compiler.artifact.vocabulary import CLUSTERS, architecture
from cuda_compiler.dialect import CUDA
from cuda_compiler.recurrence.cluster import RecurrenceCosts, divide, lower_cluster
from cuda_compiler.skeleton import KERNELS
from npu_compiler.artifact.plan import CallOption, Step, choice_of
from npu_compiler.dtypes import BFLOAT16, FLOAT16
from npu_compiler.integers import ceil_div, power_of_two
from npu_compiler.lowering import recurrence_steps as shared
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.problems.recurrence import Recurrence
from npu_compiler.lowering.target import Lowering, lowering_of

__all__ = ["RECURRENCE_STEP", "RECURRENCE_TILE", "lower_recurrence"]

_WARPS = 4
RECURRENCE_STEP = shared.step_template(
    "recurrence_step", f"{shared.MACROS} WARPS", 32 * _WARPS, files="recurrence_cell.cuh"
)
_TILE_WARPS, _TILE_LINES, _TILE_ROWS = 8, 16, 8  # of a block, rows of weights of a tile, and of the batch
_MOST_SETS = 4  # tiles of rows of the batch of a block
_CHUNK = 8  # neighbours along h that are read together
_TENSOR_CORES = architecture(80)
_KNOWN = {"units", "weight0_k", "weight1_k", "hidden_unit"}  # when a kernel on tensor cores is compiled
RECURRENCE_TILE = shared.step_template(
    "recurrence_tile",
    macros=f"a_t {shared.FORM_MACROS} UNITS SETS WARPS",
    threads=32 * _TILE_WARPS,
    files="tensor_cores.cuh recurrence_cell.cuh",
    known=_KNOWN,
)


@lowering_of(Recurrence)
def lower_recurrence(problem: Recurrence, group: Group, lowering: Lowering) -> list[Step]:
    """The launches.

    Raises:
        OpRefusal: Operands differ in their data types.
    """
    shared.check_dtypes(problem)
    given = KERNELS, problem, group, lowering
    options = [CallOption("", shared.step_calls(RECURRENCE_STEP, _step_form(problem), *given))]
    division = divide(problem, lowering.device)
    if division is not None and division.microseconds(lowering.device) < _steps_microseconds(problem, lowering.device):
        options.insert(0, CallOption(CLUSTERS, (lower_cluster(division, group, lowering),)))
    elif problem.result.dtype in (FLOAT16, BFLOAT16) and shared.are_read_in(_CHUNK, problem):
        calls = shared.step_calls(RECURRENCE_TILE, _tile_form(problem), *given)
        options.insert(0, CallOption(_TENSOR_CORES, calls))
    return [*choice_of(options)]


def _step_form(problem: Recurrence) -> shared.Form:
    """A warp computes a unit for some rows of the batch."""
    grid = ceil_div(problem.hidden, _WARPS), ceil_div(problem.batch, shared.rows(problem)), problem.directions
    return {**shared.macros(problem), "WARPS": _WARPS, "a_t": CUDA.storage[problem.result.dtype.name]}, grid


def _tile_form(problem: Recurrence) -> shared.Form:
    """A block computes a tile of rows of weights for some tiles of rows of the batch."""
    sets = min(_MOST_SETS, power_of_two(ceil_div(problem.batch, _TILE_ROWS)))
    units = ceil_div(problem.hidden, _TILE_LINES // problem.cell.gates)
    sizes = {"UNITS": problem.hidden, "SETS": sets, "WARPS": _TILE_WARPS}
    macros = {**shared.form_macros(problem), **sizes, "a_t": CUDA.storage[problem.result.dtype.name]}
    return macros, (units, ceil_div(problem.batch, _TILE_ROWS * sets), problem.directions)


def _steps_microseconds(problem: Recurrence, device: DeviceModel) -> float:
    """What a launch for each step takes: weights come from the last cache for each tile of the batch."""
    reads = ceil_div(problem.batch, shared.rows(problem)) * problem.directions
    nbytes = problem.cell.gates * problem.hidden**2 * problem.result.dtype.size * reads
    return problem.steps * (RecurrenceCosts.of(device).launch + nbytes / device.cache_gbs / 1000)
