"""`npu compile`: IR to a program."""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter

from npu_cli.lowering import compile_whole
from npu_compiler.artifact.describe import counted
from npu_compiler.artifact.output_file import check_output
from npu_compiler.compiled_program import CompiledProgram, is_program_file
from npu_compiler.errors import InputError

__all__ = ["execute", "summary"]


def execute(args: argparse.Namespace) -> int:
    if args.ir.is_dir():
        raise InputError(f"given the folder '{args.ir}', expected an IR.json; npu_compiler.extract writes one")
    if is_program_file(args.ir):
        raise InputError(f"given '{args.ir}', which is compiled already; run it, or give the IR.json it was made from")
    output: Path = args.output or args.ir.with_suffix(".npubin")
    check_output(output, [args.ir, args.ir.with_suffix(".safetensors")])
    start = perf_counter()
    program = compile_whole(args.ir, args.target, args.dtype, args.device)
    seconds = perf_counter() - start
    program.save(output)
    print(f"{output}: {summary(program)}, compiled in {seconds * 1000:.0f} ms")
    return 0


def summary(program: CompiledProgram) -> str:
    """A program in a few words."""
    plan = program.main.resolved(lambda choice, kernels: 0)
    return (
        f"{program.model} for {program.target} in {program.compute_dtype}, {counted(len(plan.steps), 'launch')} of "
        f"{counted(len(plan.kernels), 'kernel')}, {plan.arena_bytes / 2**20:.1f} MiB of working memory"
    )
