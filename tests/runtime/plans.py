"""Small programs made by hand: what a compiler would emit, with kernels that any Metal accepts."""

from __future__ import annotations

import struct
from dataclasses import replace

from npu_compiler.artifact.plan import (
    Argument,
    Buffer,
    CallChoice,
    CallOption,
    ExecutionPlan,
    KernelCall,
    KernelSource,
    Role,
    Step,
)
from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import FLOAT16, FLOAT32, INT32, INT64
from npu_compiler.tensor.layout import BufferSpec, Layout, dense

AXPY = KernelSource(
    "axpy",
    """
#include <metal_stdlib>
using namespace metal;

struct AxpyParams {
    uint count;
    float factor;
};

kernel void axpy(device const half* x [[buffer(0)]],
                 device const half* y [[buffer(1)]],
                 device half* result [[buffer(2)]],
                 constant AxpyParams& params [[buffer(3)]],
                 uint i [[thread_position_in_grid]]) {
    if (i < params.count) {
        result[i] = half(params.factor * float(x[i]) + float(y[i]));
    }
}
""",
)

COUNT_UP = KernelSource(
    "count_up",
    """
#include <metal_stdlib>
using namespace metal;

kernel void count_up(device int* counter [[buffer(0)]],
                     device const int* step [[buffer(1)]],
                     device int* before [[buffer(2)]],
                     uint i [[thread_position_in_grid]]) {
    before[i] = counter[i];
    counter[i] = counter[i] + step[i];
}
""",
)

SHAPE = (4, 5)
COUNT = 20
_OFFSET = 256  # of the intermediate tensor in the arena


def axpy_step(label: str, x: Argument, y: Argument, result: Argument, factor: float) -> KernelCall:
    """result = factor * x + y over `COUNT` elements."""
    params = struct.pack("<If", COUNT, factor)
    return KernelCall(label, 0, (x, y, result), params, (1, 1, 1), (32, 1, 1), flops=2 * COUNT, nbytes=6 * COUNT)


def axpy_plan() -> ExecutionPlan:
    """out = 3 * (2 * x + w) + x, for x, w and out of shape `SHAPE`."""
    x, out = (BufferSpec(name, FLOAT16, FLOAT32, dense(SHAPE)) for name in ("x", "out"))
    buffers = (
        Buffer(Role.INPUT, "x", x.nbytes),
        Buffer(Role.WEIGHT, "w", x.nbytes),
        Buffer(Role.ARENA, "", 512),
        Buffer(Role.OUTPUT, "out", out.nbytes),
    )
    steps = (
        axpy_step("inner", Argument(0, 0), Argument(1, 0), Argument(2, _OFFSET, writes=True), 2.0),
        axpy_step("outer", Argument(2, _OFFSET), Argument(0, 0), Argument(3, 0, writes=True), 3.0),
    )
    return ExecutionPlan(buffers, (AXPY,), steps, (x,), (out,), notes=("a note",))


def choice_plan() -> ExecutionPlan:
    """`axpy_plan` with a choice: the same as one step, with a kernel that no device has, or as two."""
    plan = axpy_plan()
    first, second = plan.steps
    assert isinstance(first, KernelCall)
    assert isinstance(second, KernelCall)
    args = (Argument(0, 0), Argument(1, 0), Argument(3, 0, writes=True))
    fused = KernelCall("both", 1, args, b"", (2, 2, 1), (32, 1, 1), 4 * COUNT, 6 * COUNT)
    options = (CallOption("tensor cores", (fused,)), CallOption("", (first, second)))
    return replace(plan, kernels=(AXPY, KernelSource("fused", "not a kernel")), steps=(CallChoice(options),))


def choice_program() -> CompiledProgram:
    return replace(axpy_program(), model="choice", functions={"main": choice_plan()})


def weight_recipe() -> WeightRecipe:
    return WeightRecipe(
        BufferSpec("w", FLOAT16, FLOAT32, dense(SHAPE)), (WeightInput("layer.weight", SHAPE, "float32"),)
    )


def axpy_program() -> CompiledProgram:
    return CompiledProgram("metal", "axpy", "float16", {"main": axpy_plan()}, (weight_recipe(),))


def padded_program() -> CompiledProgram:
    """`axpy_program` with x in channels-last order and padded: the kernel sees the padding as zeros."""
    layout = Layout((1, 3, 2, 2), (1, 5, 2, 2), (0, 2, 3, 1))
    plan = axpy_plan()
    specs = [BufferSpec(name, FLOAT16, FLOAT32, layout) for name in ("x", "out", "w")]
    recipe = WeightRecipe(specs[2], (WeightInput("layer.weight", layout.shape, "float32"),))
    plan = replace(plan, inputs=(specs[0],), outputs=(specs[1],))
    return CompiledProgram("metal", "padded", "float16", {"main": plan}, (recipe,))


def counter_program() -> CompiledProgram:
    """before = counter; counter += step. The output `counter_out` is the input `counter`, updated in place."""
    counter, step, counter_out, before = (
        BufferSpec(name, INT32, INT64, dense((8,))) for name in ("counter", "step", "counter_out", "before")
    )
    buffers = (
        Buffer(Role.INPUT, "counter", 32),
        Buffer(Role.INPUT, "step", 32),
        Buffer(Role.OUTPUT, "before", 32),
    )
    arguments = (Argument(0, 0, writes=True), Argument(1, 0), Argument(2, 0, writes=True))
    steps: tuple[Step, ...] = (KernelCall("count", 0, arguments, b"", (1, 1, 1), (8, 1, 1)),)
    plan = ExecutionPlan(
        buffers, (COUNT_UP,), steps, (counter, step), (counter_out, before), state=(("counter_out", "counter"),)
    )
    return CompiledProgram("metal", "counter", "float16", {"main": plan}, ())
