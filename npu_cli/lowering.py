"""Compiling for a command: what cannot be compiled as a whole is told all at once, with what to type instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import npu_compiler
from npu_cli.progress import waiting
from npu_compiler.artifact.describe import counted
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import NPUError, UnsupportedOpError
from npu_compiler.lowering.target import target_named
from npu_compiler.partitioning.refusals import refusals, refusals_text

__all__ = ["compile_whole", "telling_all"]


def compile_whole(ir: Path, target: str | None, dtype: str | None = None, device: str | None = None) -> CompiledProgram:
    """As `npu_compiler.compile`, but the error lists every op that does not lower.

    Raises:
        NPUError: As `npu_compiler.compile`.
    """
    target = target_named(target).name
    with telling_all([ir], target, f"npu run {ir} --partition"), waiting("compiling the model"):
        return npu_compiler.compile(ir, target=target, dtype=dtype, device=device)


@contextmanager
def telling_all(sources: Sequence[Path], target: str, remedy: str) -> Iterator[None]:
    """Gives an `UnsupportedOpError` of the block the words of all refusals in `sources`.

    Args:
        sources: The IRs that the block compiles.
        target: The target that it compiles them for.
        remedy: A command that runs them nevertheless.
    """
    try:
        yield
    except UnsupportedOpError as error:
        found = list(dict.fromkeys(refusal for source in sources for refusal in refusals(source, target)))
        if not found:  # each node lowers by itself
            raise
        ops = len({refusal.op for refusal in found})
        raise NPUError(
            f"the model does not run on {target} as a whole, {counted(ops, 'op')} cannot be compiled:\n"
            f"{refusals_text(found)}\n`{remedy}` runs such nodes on the CPU, and `npu partition {sources[0]}` shows "
            "which"
        ) from error
