"""Which kernels of a plan a GPU may come to run, and that they compile for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from cuda_compiler import skeleton
from cuda_compiler.early_launches import kernel_number
from cuda_runtime.capability import meets
from cuda_runtime.nvrtc import OPTIONS, compile_kernel, nvrtc_version
from npu_compiler.artifact.plan import Call, ExecutionPlan, KernelCall, KernelSource, Step, options_of
from npu_compiler.errors import KernelCompileError
from npu_compiler.lowering.target import Lowering

__all__ = [
    *("check_compile", "check_plan_compiles", "compile_together", "kernels_for", "launches_told", "one_of_each_form"),
    "remember_in",
]

_NUMBER = re.compile(r"\b\d+\b")
_TILING = re.compile(r"^#define (?:TILE_[MNK]|STAGES|BLOCKS) .*$", re.MULTILINE)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_TOGETHER = 8  # texts of a unit; more save little
_compiled: Path | None = None  # a folder with an empty file for each kernel and each name that compiled in this session


def kernels_for(plan: ExecutionPlan, capability: int) -> list[KernelSource]:
    """The kernels of all options that a device of this capability (times ten) can run, with the library at hand."""
    calls = (call for step in plan.steps for calls in _options(step, capability) for call in calls)
    indices = {call.kernel for call in calls if isinstance(call, KernelCall)}
    return [plan.kernels[index] for index in sorted(indices)]


def one_of_each_form(kernels: Iterable[KernelSource]) -> list[KernelSource]:
    """Of the kernels that differ in no more than the sizes of a layer one for each tiling: they compile alike."""
    forms = {(_NUMBER.sub("", kernel.text), *_TILING.findall(kernel.text)): kernel for kernel in kernels}
    return list(forms.values())


def launches_told(monkeypatch: pytest.MonkeyPatch, entry: str) -> list[tuple[bool, bool]]:
    """Whether each launch of a kernel of this name that is lowered from now on hurries, and streams."""
    told: list[tuple[bool, bool]] = []

    def number(source: KernelSource, lowering: Lowering, hurries: bool = False, streams: bool = False) -> int:
        if source.entry == entry:
            told.append((hurries, streams))
        return kernel_number(source, lowering, hurries, streams)

    monkeypatch.setattr(skeleton, "kernel_number", number)
    return told


def remember_in(folder: Path) -> None:
    """Names the folder in which the processes of a session tell each other what compiled."""
    global _compiled
    folder.mkdir(exist_ok=True)
    _compiled = folder


def check_compile(kernels: Iterable[KernelSource], architecture: int) -> None:
    """Compiles kernels, each once in a session.

    The first of each name is compiled as users compile it, for whichever architecture comes first. The others are
    checked: several at a time, and without the optimisations that take the most time.

    Raises:
        KernelCompileError: One is refused.
    """
    distinct = {kernel.digest: kernel for kernel in kernels}
    waiting = [kernel for kernel in distinct.values() if not _is_known(f"{kernel.digest}-{architecture}")]
    first = {kernel.entry: kernel for kernel in reversed(waiting) if not _is_known(kernel.entry)}
    others = [kernel for kernel in waiting if first.get(kernel.entry) is not kernel]
    together = max(1, min(_TOGETHER, len(others) // (os.cpu_count() or 1)))
    batches = [others[start : start + together] for start in range(0, len(others), together)]

    def compile_first(kernel: KernelSource) -> None:
        assert compile_kernel(kernel.text, kernel.entry, architecture)
        _remember(f"{kernel.digest}-{architecture}", kernel.entry)

    def compile_batch(batch: Sequence[KernelSource]) -> None:
        compile_together([(kernel.text, (kernel.entry,)) for kernel in batch], architecture)
        _remember(*(f"{kernel.digest}-{architecture}" for kernel in batch))

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(compile_first, first.values()))
        list(workers.map(compile_batch, batches))


def compile_together(texts: Sequence[tuple[str, Sequence[str]]], architecture: int) -> None:
    """Compiles texts, each with the names of its kernels, as one translation unit, to see that they compile.

    The compiler takes 20 ms for any unit, half of what most kernels take. Each text has a namespace, and its macros end
    with it, so that none sees what another defines; a unit that is refused tells nothing: then each is compiled alone.

    Raises:
        KernelCompileError: One is refused.
    """
    options = (*OPTIONS, *(("--Ofast-compile=mid",) if nvrtc_version() >= (12, 9) else ()))
    if len(texts) > 1:
        unit = "\n".join(_enclosed(number, text, entries) for number, (text, entries) in enumerate(texts))
        with suppress(KernelCompileError):
            assert compile_kernel(unit, ", ".join(entries[0] for _, entries in texts), architecture, options)
            return
    for text, entries in texts:
        assert compile_kernel(text, entries[0], architecture, options)


def _enclosed(number: int, text: str, entries: Sequence[str]) -> str:
    """A text among others; its kernels, whose names no namespace changes, get its number."""
    renamed = "".join(f"#define {name} {name}_{number}\n" for name in entries)
    ended = "".join(f"#undef {name}\n" for name in {*entries, *_MACRO.findall(text)})
    return f"{renamed}namespace text_{number} {{\n{text}\n}}\n{ended}"


def _is_known(name: str) -> bool:
    return _compiled is not None and (_compiled / name).exists()


def _remember(*names: str) -> None:
    if _compiled is not None:
        for name in names:
            (_compiled / name).touch()


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
