"""`npu describe`: everything a program holds, as text."""

from __future__ import annotations

import argparse

from npu_compiler.compiled_program import CompiledProgram

__all__ = ["execute"]


def execute(args: argparse.Namespace) -> int:
    print(CompiledProgram.load(args.program).describe())
    return 0
