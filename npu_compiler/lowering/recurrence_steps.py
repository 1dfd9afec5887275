"""A recurrence by one launch for each step, which any device can run: what targets share of it.

A group of lanes computes all gates of a unit for a few rows of the batch, and then its new h. States that elementwise
arithmetic carries (c, and the h of a GRU) stay in float32, beside what the steps store.
"""

from __future__ import annotations

from npu_compiler.artifact.plan import Argument
from npu_compiler.lowering.problems.operand import Operand
from npu_compiler.lowering.problems.recurrence import Cell, Recurrence
from npu_compiler.tensor.symbolic import OpRefusal

__all__ = ["CELLS", "MACROS", "INPUTS", "OUTPUTS", "PARAMS", "bindings", "check_dtypes", "chunk", "macros", "values"]

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
CELLS = {Cell.LSTM: 0, Cell.GRU: 1, Cell.TANH: 2, Cell.RELU: 3}
"""How kernels know what a step computes: their macro ``CELL``."""

PARAMS = "int step, steps, batch, units, " + ", ".join(
    f"{name}_{dimension}" for name, dimensions in _STRIDES.items() for dimension in dimensions
)
INPUTS = " ".join(_STRIDES)
OUTPUTS = "out kept"
MACROS = "a_t CELL GATES DIRECTIONS ROWS CHUNK HAS_BIAS HAS_HIDDEN HAS_CARRIED"
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


def chunk(problem: Recurrence) -> int:
    """Neighbours along h that are read at once."""
    read = [operand for name, operand in zip(problem.names, problem.operands, strict=True) if _is_walked(name)]
    return _CHUNK if problem.hidden % _CHUNK == 0 and all(each.has_chunks(_CHUNK) for each in read) else 1


def _is_walked(name: str) -> bool:
    return name == "hidden" or name.startswith("weight")


def macros(problem: Recurrence) -> dict[str, object]:
    """What the kernels are told, but for their data type."""
    return {
        "CELL": CELLS[problem.cell],
        "GATES": problem.cell.gates,
        "DIRECTIONS": problem.directions,
        "ROWS": min(_MOST_ROWS, 1 << (max(1, problem.batch) - 1).bit_length()),
        "CHUNK": chunk(problem),
        "HAS_BIAS": int(problem.operand("bias0") is not None),
        "HAS_HIDDEN": int(problem.operand("hidden") is not None),
        "HAS_CARRIED": int(problem.operand("carried") is not None),
    }


def values(problem: Recurrence, step: int) -> dict[str, int]:
    """The parameters of the launch for a step."""
    found = {"step": step, "steps": problem.steps, "batch": problem.batch, "units": problem.hidden}
    for name, dimensions in _STRIDES.items():
        operand = _operand(problem, name)
        strides = (0,) * len(dimensions) if operand is None else operand.strides
        found |= {f"{name}_{key}": stride for key, stride in zip(dimensions, strides, strict=True)}
    return found


def bindings(problem: Recurrence) -> dict[str, Argument]:
    """What the kernels bind as inputs; where there is no such operand, another one that they do not read there."""
    present = {name: _operand(problem, name) for name in _STRIDES}
    other = problem.operands[0].argument
    return {name: other if operand is None else operand.argument for name, operand in present.items()}


def _operand(problem: Recurrence, name: str) -> Operand | None:
    """An operand; the second direction's is that of the first one where there is no second."""
    return problem.of_direction(name[:-1], int(name[-1])) if name[-1] in "01" else problem.operand(name)
