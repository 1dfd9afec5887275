"""Which kernels of a plan a GPU may come to run, and that they compile for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cuda_runtime.capability import meets
from cuda_runtime.nvrtc import compile_kernel
from npu_compiler.artifact.plan import Call, ExecutionPlan, KernelCall, KernelSource, Step, options_of

__all__ = ["check_compile", "check_plan_compiles", "kernels_for", "one_of_each_form", "remember_in"]

_NUMBER = re.compile(r"\b\d+\b")
_TILING = re.compile(r"^#define (?:TILE_[MNK]|STAGES|BLOCKS) .*$", re.MULTILINE)
_compiled: Path | None = None  # a folder with an empty file for each kernel that compiled in this session


def kernels_for(plan: ExecutionPlan, capability: int) -> list[KernelSource]:
    """The kernels of all options that a device of this capability (times ten) can run, with the library at hand."""
    calls = (call for step in plan.steps for calls in _options(step, capability) for call in calls)
    indices = {call.kernel for call in calls if isinstance(call, KernelCall)}
    return [plan.kernels[index] for index in sorted(indices)]


def one_of_each_form(kernels: Iterable[KernelSource]) -> list[KernelSource]:
    """Of the kernels that differ in no more than the sizes of a layer one for each tiling: they compile alike."""
    forms = {(_NUMBER.sub("", kernel.text), *_TILING.findall(kernel.text)): kernel for kernel in kernels}
    return list(forms.values())


def remember_in(folder: Path) -> None:
    """Names the folder in which the processes of a session tell each other what compiled."""
    global _compiled
    folder.mkdir(exist_ok=True)
    _compiled = folder


def check_compile(kernels: Iterable[KernelSource], architecture: int) -> None:
    """Compiles kernels, each once in a session of the tests of this folder.

    Raises:
        KernelCompileError: One is refused.
    """

    def compile_once(kernel: KernelSource) -> None:
        mark = None if _compiled is None else _compiled / f"{kernel.digest}-{architecture}"
        if mark is None or not mark.exists():
            assert compile_kernel(kernel.text, kernel.entry, architecture)
            if mark is not None:
                mark.touch()

    distinct = {kernel.digest: kernel for kernel in kernels}
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(compile_once, distinct.values()))


def check_plan_compiles(plan: ExecutionPlan, architecture: int) -> None:
    """Compiles every kernel of a plan that a device of this architecture may come to run.

    Raises:
        KernelCompileError: One is refused.
    """
    check_compile(kernels_for(plan, architecture), architecture)


def _options(step: Step, capability: int) -> Iterator[tuple[Call, ...]]:
    for option in options_of(step):
        if option.requires == "cublas" or meets(option.requires, capability):
            yield option.calls
