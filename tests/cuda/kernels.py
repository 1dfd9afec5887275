"""Which kernels of a plan a GPU may come to run."""

from __future__ import annotations

from collections.abc import Iterator

from cuda_runtime.capability import meets
from npu_compiler.codegen.plan import Call, CallChoice, ExecutionPlan, KernelCall, KernelSource


def kernels_for(plan: ExecutionPlan, capability: int) -> list[KernelSource]:
    """The kernels of all options that a device of this capability (times ten) can run, with the library at hand."""
    calls = {call.kernel for call in _calls(plan, capability) if isinstance(call, KernelCall)}
    return [plan.kernels[index] for index in sorted(calls)]


def _calls(plan: ExecutionPlan, capability: int) -> Iterator[Call]:
    for step in plan.steps:
        if not isinstance(step, CallChoice):
            yield step
            continue
        for option in step.options:
            if option.requires == "cublas" or meets(option.requires, capability):
                yield from option.calls
