"""A recurrence by one launch for each step, which any device can run: what targets share of it.

A group of lanes computes all gates of a unit for a few rows of the batch, and then its new h. States that elementwise
arithmetic carries (c, and the h of a GRU) stay in float32, beside what the steps store.
"""

from __future__ import annotations

from collections.abc import Collection

from npu_compiler.artifact.plan import Argument, KernelCall
from npu_compiler.dtypes import FLOAT32
from npu_compiler.integers import power_of_two
from npu_compiler.lowering.anchors import KernelWriter
from npu_compiler.lowering.grouping import Group
from npu_compiler.lowering.loops import output_argument, traffic_of
from npu_compiler.lowering.problems.operand import Operand, named_strides
from npu_compiler.lowering.problems.recurrence import Cell, Recurrence
from npu_compiler.lowering.target import Lowering
from npu_compiler.lowering.templates import KernelTemplate, Launch
from npu_compiler.tensor.symbolic import OpRefusal

__all__ = ["FORM_MACROS", "INPUTS", "MACROS", "STRIDES", "are_read_in", "bindings", "check_dtypes", "form_macros"]
__all__ += ["macros", "rows", "step_calls", "step_template", "strides", "values"]

_STRIDES = {
    "gates0": ("step", "batch", "unit"),
    "weight0": ("row", "k"),
    "bias0": ("unit",),
    "gates1": ("step", "batch", "unit"),
    "weight1": ("row", "k"),
    "bias1": ("unit",),
    "hidden": ("direction", "batch", "unit"),
    "carried": ("direction", "batch", "unit"),
}
_CELLS = {Cell.LSTM: 0, Cell.GRU: 1, Cell.TANH: 2, Cell.RELU: 3}
"""How kernels know what a step computes: their macro ``CELL``."""

STRIDES = ", ".join(f"{name}_{dimension}" for name, dimensions in _STRIDES.items() for dimension in dimensions)
INPUTS = " ".join(_STRIDES)
FORM_MACROS = "CELL GATES DIRECTIONS HAS_BIAS HAS_HIDDEN HAS_CARRIED"
MACROS = f"a_t {FORM_MACROS} ROWS CHUNK"
_CHUNK = 4
_MOST_ROWS = 4


def check_dtypes(problem: Recurrence) -> None:
    """Refuses operands of several data types.

    Raises:
        OpRefusal: There are some.
    """
    given = {operand.dtype for operand in problem.operands} | {problem.result.dtype}
    if len(given) > 1:
        raise OpRefusal(f"given {', '.join(sorted(map(str, given)))}, expected one data type for all")


def step_template(
    entry: str, macros: str, threads: int, files: str = "", known: Collection[str] = ()
) -> KernelTemplate:
    """A kernel of one step.

    Args:
        entry: The kernel.
        macros: What its file is told.
        threads: Of a group.
        files: Those that it builds on.
        known: Parameters that it does not have.
    """
    names = ("step", "steps", "batch", "units", *STRIDES.split(", "))
    params = f"int {', '.join(name for name in names if name not in known)}"
    return KernelTemplate(entry, params, macros, INPUTS, "out kept", threads, files=files)


Form = tuple[dict[str, object], tuple[int, int, int]]
"""The macros and the grid of a step."""


def step_calls(
    template: KernelTemplate, form: Form, writer: KernelWriter, problem: Recurrence, group: Group, lowering: Lowering
) -> tuple[KernelCall, ...]:
    """A launch for each step."""
    macros, grid = form
    kept = Argument(lowering.scratch(problem.states * FLOAT32.size), writes=True)
    nbytes = traffic_of(group, lowering.tensors) // problem.steps
    launches = (
        Launch(
            template,
            grid=grid,
            values=template.values_among(values(problem, step)),
            macros=macros,
            inputs=bindings(problem),
            outputs={"out": output_argument(group), "kept": kept},
            flops=problem.flops // problem.steps,
        )
        for step in range(problem.steps)
    )
    label = " + ".join(group.nodes)
    return tuple(writer.launch_alone(launch, label, nbytes, lowering) for launch in launches)


def are_read_in(count: int, problem: Recurrence) -> bool:
    """Whether weights and initial states can be read by so many neighbours along h."""
    walked = (name for name in problem.names if name == "hidden" or name.startswith("weight"))
    return problem.hidden % count == 0 and all(problem[name].has_chunks(count) for name in walked)


def form_macros(problem: Recurrence) -> dict[str, object]:
    """What kernels are told of the form of a recurrence."""
    return {
        "CELL": _CELLS[problem.cell],
        "GATES": problem.cell.gates,
        "DIRECTIONS": problem.directions,
        "HAS_BIAS": int("bias0" in problem.names),
        "HAS_HIDDEN": int("hidden" in problem.names),
        "HAS_CARRIED": int("carried" in problem.names),
    }


def rows(problem: Recurrence) -> int:
    """Rows of the batch that a group of lanes computes together."""
    return min(_MOST_ROWS, power_of_two(problem.batch))


def macros(problem: Recurrence) -> dict[str, object]:
    """What kernels of a step are told, but for their data type."""
    chunk = _CHUNK if are_read_in(_CHUNK, problem) else 1
    return {**form_macros(problem), "ROWS": rows(problem), "CHUNK": chunk}


def strides(problem: Recurrence) -> dict[str, int]:
    """Strides of the operands by the names of parameters; zeros for those that are not there."""
    found: dict[str, int] = {}
    for name, dimensions in _STRIDES.items():
        found |= named_strides(_operand(problem, name), name, dimensions)
    return found


def values(problem: Recurrence, step: int) -> dict[str, int]:
    """The parameters of the launch for a step."""
    sizes = {"step": step, "steps": problem.steps, "batch": problem.batch, "units": problem.hidden}
    return {**sizes, **strides(problem)}


def bindings(problem: Recurrence) -> dict[str, Argument]:
    """What the kernels bind as inputs; where there is no such operand, another one that they do not read there."""
    present = {name: _operand(problem, name) for name in _STRIDES}
    other = problem.operands[0].argument
    return {name: other if operand is None else operand.argument for name, operand in present.items()}


def _operand(problem: Recurrence, name: str) -> Operand | None:
    """An operand; the second direction's is that of the first one where there is no second."""
    known = name if name[-1] not in "01" else f"{name[:-1]}{min(int(name[-1]), problem.directions - 1)}"
    return problem[known] if known in problem.names else None
