"""States of reductions in CUDA C++: their types, and the functions by which lanes and warps combine them.

Sums and extrema have theirs in `common.cuh`, where other kernels use them too. What else an op reduces by is written
from its combination: a struct where a state is several numbers, the function that combines two, and the one that takes
a state from another lane. The macros of the header make reductions of rows and columns out of these.
"""

from __future__ import annotations

from collections.abc import Sequence

from cuda_compiler.dialect import CUDA
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.anchors import function
from npu_compiler.lowering.loops import RowPhase, combine_text

__all__ = [
    "COLUMNS",
    "ROWS",
    "identity",
    "numbers",
    "reduction_of",
    "state_bytes",
    "state_functions",
    "state_type",
    "value_of",
]

_IN_HEADER = {"add": "sum", "max": "max", "min": "min"}
"""The reductions of `common.cuh`, by the function that combines two numbers."""


def reduction_of(phase: RowPhase) -> str:
    """What the functions of a reduction are called after their ``combine_``, ``row_`` or ``columns_``."""
    known = _IN_HEADER.get(phase.combination.function or "")
    return known or "_".join((phase.combination.name, *phase.registers))


def state_type(phase: RowPhase) -> str:
    """The type of a state."""
    return phase.registers[0] if len(phase.registers) == 1 else f"State_{reduction_of(phase)}"


_BYTES = {"bool": 1, "int": 4, "float": 4, "int64": 8}


def state_bytes(phases: Sequence[RowPhase]) -> int:
    """Shared memory that one state of every reduction takes; reductions that are alike share theirs."""
    kinds = {reduction_of(phase): [_BYTES[register] for register in phase.registers] for phase in phases}
    return sum(ceil_div(sum(sizes), max(sizes)) * max(sizes) for sizes in kinds.values())


def identity(phase: RowPhase) -> str:
    """The state of no elements."""
    return _state(phase, phase.identity)


def value_of(phase: RowPhase) -> str:
    """The state of the element at hand."""
    return _state(phase, phase.values)


def numbers(phase: RowPhase, state: str) -> list[str]:
    """Declarations of the numbers of a finished state under their names, where they are several."""
    if len(phase.registers) == 1:
        return []
    named = zip(phase.registers, phase.names(phase.name), strict=True)
    return [f"const {kind} {name} = {state}.s{item};" for item, (kind, name) in enumerate(named)]


def _state(phase: RowPhase, values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{state_type(phase)}{{{', '.join(values)}}}"


ROWS = ("NPU_WARP_REDUCTION", "NPU_ROW_REDUCTION")
COLUMNS = ("NPU_COLUMN_REDUCTION",)
"""The macros of the headers by which a kernel of rows, and one of columns, reduces, given how two are combined."""


def state_functions(phases: Sequence[RowPhase], macros: Sequence[str]) -> list[str]:
    """Types and functions of the reductions that no header has.

    Args:
        phases: The reductions of a kernel.
        macros: `ROWS` or `COLUMNS`.
    """
    own = {reduction_of(phase): phase for phase in phases if phase.combination.function not in _IN_HEADER}
    made = [f"{macro}({name})" for name in own for macro in macros]
    return [*(line for name, phase in own.items() for line in _functions(name, phase)), *made]


def _functions(name: str, phase: RowPhase) -> list[str]:
    kind, count = state_type(phase), len(phase.registers)
    members = [f"s{item}" for item in range(count)]
    left, right = ([state] if count == 1 else [f"{state}.{member}" for member in members] for state in ("a", "b"))
    lines, values = combine_text(phase.combination, left, right, CUDA, "    ")
    inline = CUDA.inline
    combine = function(f"{inline} {kind} combine_{name}({kind} a, {kind} b)", lines, _state(phase, values))
    if count == 1:
        return [combine]
    fields = " ".join(f"{register} {member};" for register, member in zip(phase.registers, members, strict=True))
    passed = [f"exchange(state.{member}, distance, lanes)" for member in members]
    exchange = function(f"{inline} {kind} exchange({kind} state, int distance, int lanes)", (), _state(phase, passed))
    return [f"struct {kind} {{ {fields} }};", combine, exchange]
