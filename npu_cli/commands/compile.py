"""`npu compile`: IR to a program."""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

import npu_compiler
from npu_compiler.compiled_program import CompiledProgram

__all__ = ["execute", "summary"]


def execute(args: argparse.Namespace) -> int:
    start = perf_counter()
    program = npu_compiler.compile(args.ir, target=args.target, dtype=args.dtype)
    seconds = perf_counter() - start
    output: Path = args.output or args.ir.with_suffix(".npubin")
    program.save(output)
    print(f"{output}: {summary(program)}, compiled in {seconds * 1000:.0f} ms")
    return 0


def summary(program: CompiledProgram) -> str:
    """A program in a few words."""
    plan = program.main.resolved(lambda choice, kernels: 0)
    return (
        f"{program.model} for {program.target} in {program.compute_dtype}, {len(plan.steps)} launches of "
        f"{len(plan.kernels)} kernels, {plan.arena_bytes / 2**20:.1f} MiB of working memory"
    )
