"""Which kernels of a plan a GPU may come to run, and that they compile for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from cuda_runtime.capability import meets
from cuda_runtime.nvrtc import compile_kernel
from npu_compiler.codegen.plan import Call, ExecutionPlan, KernelCall, KernelSource, Step, options_of

__all__ = ["check_compile", "check_plan_compiles", "kernels_for", "preferred_kernels"]

_NUMBER = re.compile(r"\b\d+\b")
_compiled: set[tuple[str, int]] = set()  # digests and kinds of this session, with their architecture


def kernels_for(plan: ExecutionPlan, capability: int) -> list[KernelSource]:
    """The kernels of all options that a device of this capability (times ten) can run, with the library at hand."""
    return _kernels(plan, (call for step in plan.steps for calls in _options(step, capability) for call in calls))


def preferred_kernels(plan: ExecutionPlan, capability: int) -> list[KernelSource]:
    """Those that it runs where nothing was tuned."""
    return _kernels(plan, (call for step in plan.steps for call in next(_options(step, capability))))


def check_compile(kernels: Iterable[KernelSource], architecture: int) -> None:
    """Compiles kernels, each once in a session.

    Raises:
        KernelCompileError: One is refused.
    """
    left = {kernel.digest: kernel for kernel in kernels if (kernel.digest, architecture) not in _compiled}
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        codes = workers.map(lambda kernel: compile_kernel(kernel.text, kernel.entry, architecture), left.values())
        assert all(codes)
    _compiled.update((key, architecture) for kernel in left.values() for key in (kernel.digest, _kind(kernel)))


def check_plan_compiles(plan: ExecutionPlan, architecture: int) -> None:
    """Compiles the kernels that 9.0 prefers; of others and for others, one of those that differ in numbers alone.

    What GPUs do differently is no matter of numbers, and tests of their own compile every tiling for 9.0.

    Raises:
        KernelCompileError: One is refused.
    """
    if architecture == 90:
        check_compile(preferred_kernels(plan, architecture), architecture)
    kinds = {_kind(kernel): kernel for kernel in kernels_for(plan, architecture)}
    check_compile((kinds[kind] for kind in kinds if (kind, architecture) not in _compiled), architecture)


def _kind(kernel: KernelSource) -> str:
    return _NUMBER.sub("#", kernel.text)


def _kernels(plan: ExecutionPlan, calls: Iterable[Call]) -> list[KernelSource]:
    indices = {call.kernel for call in calls if isinstance(call, KernelCall)}
    return [plan.kernels[index] for index in sorted(indices)]


def _options(step: Step, capability: int) -> Iterator[tuple[Call, ...]]:
    for option in options_of(step):
        if option.requires == "cublas" or meets(option.requires, capability):
            yield option.calls
