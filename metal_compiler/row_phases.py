"""Reductions over a row by one threadgroup: through registers, then simdgroups, then threadgroup memory."""

from __future__ import annotations

from collections.abc import Sequence

from npu_compiler.dtypes import INT64
from npu_compiler.lowering.dialect import Dialect
from npu_compiler.lowering.loops import RowPhase, RowProgram, combine_text

__all__ = ["phase_extents", "phases_text"]


def phase_extents(program: RowProgram) -> dict[str, int]:
    """The parameters that the phases need: how many columns each reduces."""
    return {f"reduced{number}": phase.extent for number, phase in enumerate(program.phases)}


def phases_text(program: RowProgram, threads: int, dialect: Dialect) -> str:
    """Statements after which every thread of a threadgroup has the result of each reduction of a row.

    They expect ``lane``, the thread's index in the threadgroup, and constants ``ROW_THREADS`` and ``ROW_SIMDGROUPS``.
    """
    return "\n".join(_phase_text(phase, number, threads, dialect) for number, phase in enumerate(program.phases))


def _phase_text(phase: RowPhase, number: int, threads: int, dialect: Dialect) -> str:
    """A reduction over the row, whose result every thread ends up with."""
    parts, results, shared = (phase.names(name) for name in (f"part{number}", phase.name, f"shared{number}"))
    lines = [
        *_declared(phase, parts, phase.identity),
        f"    for (int c = lane; c < p.reduced{number}; c += ROW_THREADS) {{",
        *([phase.body] if phase.body else []),
        *_combined(phase, parts, phase.values, dialect),
        "    }",
    ]
    if dialect.register(INT64) in phase.registers:
        return "\n".join([*lines, *_through_memory(phase, parts, results, shared, dialect)])
    of_lanes = parts if phase.combination.function not in _LANES else (f"lanes{number}",)
    lines += _exchanged(phase, number, parts, dialect) if of_lanes is parts else _across_lanes(phase, number)
    if threads == 32:
        return "\n".join([*lines, *_declared(phase, results, of_lanes)])
    groups = threads // 32
    lines += [
        *(f"    threadgroup {kind} {name}[{groups}];" for kind, name in zip(phase.registers, shared, strict=True)),
        "    if (lane % 32 == 0) {",
        *(f"        {name}[lane / 32] = {value};" for name, value in zip(shared, of_lanes, strict=True)),
        "    }",
        "    threadgroup_barrier(mem_flags::mem_threadgroup);",
        *_declared(phase, results, [f"{name}[0]" for name in shared]),
        *_loop(phase, "ROW_SIMDGROUPS", results, shared, dialect),
    ]
    return "\n".join(lines)


_LANES = {"add": "simd_sum", "mul": "simd_product", "max": "simd_max", "min": "simd_min"}
"""What Metal combines across the lanes of a simdgroup by itself, by the function that combines two."""


def _declared(phase: RowPhase, names: Sequence[str], values: Sequence[str]) -> list[str]:
    declarations = zip(phase.registers, names, values, strict=True)
    return [f"    {kind} {name} = {value};" for kind, name, value in declarations]


def _combined(phase: RowPhase, state: Sequence[str], other: Sequence[str], dialect: Dialect) -> list[str]:
    """Statements that combine a state with another one, in its place."""
    lines, values = combine_text(phase.combination, state, other, dialect, "        ")
    return [*lines, *(f"        {name} = {value};" for name, value in zip(state, values, strict=True))]


def _loop(phase: RowPhase, count: str, results: Sequence[str], shared: Sequence[str], dialect: Dialect) -> list[str]:
    """Combines a state with all others that lie in threadgroup memory."""
    steps = _combined(phase, results, [f"{name}[s]" for name in shared], dialect)
    head = f"    for (int s = 1; s < {count}; ++s) {{"
    return [f"{head} {steps[0].strip()} }}"] if len(steps) == 1 else [head, *steps, "    }"]


def _across_lanes(phase: RowPhase, number: int) -> list[str]:
    """Combines the parts of a simdgroup. Metal's own extrema lose a NaN, so it is looked for."""
    (register,), function = phase.registers, phase.combination.function
    lanes = f"{_LANES[function or '']}(part{number})"
    if function in ("add", "mul") or register != "float":
        return [f"    {register} lanes{number} = {lanes};"]
    return [
        f"    int unordered{number} = simd_max(part{number} != part{number} ? 1 : 0);",
        f"    float ordered{number} = {lanes};",
        f"    float lanes{number} = unordered{number} != 0 ? NAN : ordered{number};",
    ]


def _exchanged(phase: RowPhase, number: int, parts: Sequence[str], dialect: Dialect) -> list[str]:
    """Combines the parts of a simdgroup, in their place: each lane with the one at a distance that halves."""
    others = phase.names(f"other{number}")
    passed = zip(phase.registers, others, parts, strict=True)
    return [
        "    for (ushort distance = 16; distance > 0; distance /= 2) {",
        *(f"        {kind} {name} = simd_shuffle_xor({part}, distance);" for kind, name, part in passed),
        *_combined(phase, parts, others, dialect),
        "    }",
    ]


def _through_memory(
    phase: RowPhase, parts: Sequence[str], results: Sequence[str], shared: Sequence[str], dialect: Dialect
) -> list[str]:
    """Combines the parts of all threads one after another: simdgroup functions take no 64-bit integers."""
    return [
        *(f"    threadgroup {kind} {name}[ROW_THREADS];" for kind, name in zip(phase.registers, shared, strict=True)),
        *(f"    {name}[lane] = {part};" for name, part in zip(shared, parts, strict=True)),
        "    threadgroup_barrier(mem_flags::mem_threadgroup);",
        *_declared(phase, results, [f"{name}[0]" for name in shared]),
        *_loop(phase, "ROW_THREADS", results, shared, dialect),
    ]
