"""Reductions over a row by one threadgroup: through registers, then simdgroups, then threadgroup memory."""

from __future__ import annotations

from metal_compiler.dialect import METAL
from npu_compiler.dtypes import INT64
from npu_compiler.lowering.loops import RowPhase, RowProgram
from npu_compiler.tensor.expr import FUNCTIONS

__all__ = ["phase_extents", "phases_text"]


def phase_extents(program: RowProgram) -> dict[str, int]:
    """The parameters that the phases need: how many columns each reduces."""
    return {f"reduced{number}": phase.extent for number, phase in enumerate(program.phases)}


def phases_text(program: RowProgram, threads: int) -> str:
    """Statements after which every thread of a threadgroup has the result of each reduction of a row.

    They expect ``lane``, the thread's index in the threadgroup, and constants ``ROW_THREADS`` and ``ROW_SIMDGROUPS``.
    """
    return "\n".join(_phase_text(phase, number, threads) for number, phase in enumerate(program.phases))


def _phase_text(phase: RowPhase, number: int, threads: int) -> str:
    """A reduction over the row, whose result every thread ends up with."""
    register, name = phase.register, phase.name
    combined = _combine(phase.kind, f"part{number}", phase.value)
    lines = [
        f"    {register} part{number} = {phase.identity};",
        f"    for (int c = lane; c < p.reduced{number}; c += ROW_THREADS) {{",
        *([phase.body] if phase.body else []),
        f"        part{number} = {combined};",
        "    }",
    ]
    if register == METAL.register(INT64):
        return "\n".join([*lines, *_through_memory(phase, number)])
    lines += _across_lanes(phase, number)
    if threads == 32:
        return "\n".join([*lines, f"    {register} {name} = lanes{number};"])
    groups = threads // 32
    step = _combine(phase.kind, name, f"shared{number}[s]")
    lines += [
        f"    threadgroup {register} shared{number}[{groups}];",
        "    if (lane % 32 == 0) {",
        f"        shared{number}[lane / 32] = lanes{number};",
        "    }",
        "    threadgroup_barrier(mem_flags::mem_threadgroup);",
        f"    {register} {name} = shared{number}[0];",
        f"    for (int s = 1; s < ROW_SIMDGROUPS; ++s) {{ {name} = {step}; }}",
    ]
    return "\n".join(lines)


def _across_lanes(phase: RowPhase, number: int) -> list[str]:
    """Combines the parts of a simdgroup. Metal's own extrema lose a NaN, so it is looked for."""
    lanes = f"simd_{phase.kind}(part{number})"
    if phase.kind == "sum" or phase.register != "float":
        return [f"    {phase.register} lanes{number} = {lanes};"]
    return [
        f"    int unordered{number} = simd_max(part{number} != part{number} ? 1 : 0);",
        f"    float ordered{number} = {lanes};",
        f"    float lanes{number} = unordered{number} != 0 ? NAN : ordered{number};",
    ]


def _through_memory(phase: RowPhase, number: int) -> list[str]:
    """Combines the parts of all threads one after another: simdgroup functions take no 64-bit integers."""
    step = _combine(phase.kind, phase.name, f"shared{number}[s]")
    return [
        f"    threadgroup {phase.register} shared{number}[ROW_THREADS];",
        f"    shared{number}[lane] = part{number};",
        "    threadgroup_barrier(mem_flags::mem_threadgroup);",
        f"    {phase.register} {phase.name} = shared{number}[0];",
        f"    for (int s = 1; s < ROW_THREADS; ++s) {{ {phase.name} = {step}; }}",
    ]


def _combine(kind: str, a: str, b: str) -> str:
    return FUNCTIONS["add" if kind == "sum" else kind].text.format(a, b)
