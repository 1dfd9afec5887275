"""Artifacts of a stranger: a small program, well compiled, with another kernel in it or other sizes around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, KernelSource
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.runtime.plans import AXPY, SHAPE, axpy_plan, axpy_program

__all__ = ["BODY", "HEAD", "kernel", "run_artifact", "with_kernel", "with_plan", "with_step"]

HEAD = "#include <metal_stdlib>\nusing namespace metal;\nstruct AxpyParams { uint count; float factor; };\n"
BODY = "if (i < params.count) result[i] = half(params.factor * float(x[i]) + float(y[i]));"


def kernel(before: str = "", body: str = BODY) -> str:
    """The text of the kernel that the program launches, with something before it or something else in it."""
    return (
        f"{HEAD}{before}\nkernel void axpy(device const half* x [[buffer(0)]], device const half* y [[buffer(1)]],\n"
        "    device half* result [[buffer(2)]], constant AxpyParams& params [[buffer(3)]],\n"
        f"    uint i [[thread_position_in_grid]])\n{{\n{body}\n}}\n"
    )


def with_kernel(text: str) -> bytes:
    """The artifact with another kernel text."""
    return with_plan(lambda plan: replace(plan, kernels=(KernelSource(AXPY.entry, text),)))


def with_step(**changes: Any) -> bytes:
    """The artifact with a first launch of other sizes."""

    def change(plan: ExecutionPlan) -> ExecutionPlan:
        first = plan.steps[0]
        assert isinstance(first, KernelCall)
        return replace(plan, steps=(replace(first, **changes), *plan.steps[1:]))

    return with_plan(change)


def with_plan(change: Callable[[ExecutionPlan], ExecutionPlan]) -> bytes:
    """The artifact with another plan."""
    return replace(axpy_program(), functions={"main": change(axpy_plan())}).to_bytes()


def run_artifact(artifact: bytes) -> NDArray[Any]:
    """Loads, prepares and runs an artifact on the software GPU, as whoever was sent it would."""
    program = CompiledProgram.from_bytes(artifact)
    device = Device("software-metal")
    executor = Executor(program, device)
    weights = load_weights({"layer.weight": np.ones(SHAPE, np.float32)}, program, device)
    x = NPUBuffer.from_numpy(np.ones(SHAPE, np.float32), device, spec=program.input_specs[0])
    outputs = executor.run({"x": x}, weights)
    return outputs["out"].to_numpy(spec=program.output_specs[0])
