"""Which kernels of a plan a GPU may come to run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from cuda_runtime.capability import meets
from npu_compiler.codegen.plan import Call, ExecutionPlan, KernelCall, KernelSource, options_of


def kernels_for(plan: ExecutionPlan, capability: int) -> list[KernelSource]:
    """The kernels of all options that a device of this capability (times ten) can run."""
    calls = {call.kernel for call in _calls(plan, capability) if isinstance(call, KernelCall)}
    return [plan.kernels[index] for index in sorted(calls)]


def _calls(plan: ExecutionPlan, capability: int) -> Iterator[Call]:
    for option in chain.from_iterable(map(options_of, plan.steps)):
        if meets(option.requires, capability):
            yield from option.calls
