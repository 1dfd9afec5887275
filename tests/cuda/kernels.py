"""Which kernels of a plan a GPU may come to run, and that they compile for it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from cuda_runtime.capability import meets
from cuda_runtime.nvrtc import compile_kernel
from npu_compiler.artifact.plan import Call, ExecutionPlan, KernelCall, KernelSource, Step, options_of

__all__ = ["check_compile", "check_plan_compiles", "kernels_for"]

_compiled: set[tuple[str, int]] = set()  # digests of this session, with their architecture


def kernels_for(plan: ExecutionPlan, capability: int) -> list[KernelSource]:
    """The kernels of all options that a device of this capability (times ten) can run, with the library at hand."""
    calls = (call for step in plan.steps for calls in _options(step, capability) for call in calls)
    indices = {call.kernel for call in calls if isinstance(call, KernelCall)}
    return [plan.kernels[index] for index in sorted(indices)]


def check_compile(kernels: Iterable[KernelSource], architecture: int) -> None:
    """Compiles kernels, each once in a session.

    Raises:
        KernelCompileError: One is refused.
    """
    left = {kernel.digest: kernel for kernel in kernels if (kernel.digest, architecture) not in _compiled}
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        codes = workers.map(lambda kernel: compile_kernel(kernel.text, kernel.entry, architecture), left.values())
        assert all(codes)
    _compiled.update((digest, architecture) for digest in left)


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
