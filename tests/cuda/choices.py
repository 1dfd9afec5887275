"""A program with a choice, made by hand: a slow kernel in clusters that only some GPUs have, or a quick one."""

from __future__ import annotations

import struct

from cuda_compiler.artifact.extensions import cluster_along_x
from npu_compiler.artifact.plan import (
    Argument,
    Buffer,
    CallChoice,
    CallOption,
    ExecutionPlan,
    KernelCall,
    KernelSource,
    Role,
)
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import FLOAT32
from npu_compiler.tensor.layout import BufferSpec, dense

COUNT = 1024
_BLOCK = 128

CLUSTERED = KernelSource(
    "clustered",
    """
struct Params { unsigned delay; };
extern "C" __global__ void clustered(const float* x, float* total, float* out, Params params) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    unsigned blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    for (unsigned i = 0; i < params.delay; ++i) __nanosleep(1000);
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i] * float(blocks);
    if (i == 0) *total += 1.0f;
}
""",
)
PLAIN = KernelSource(
    "plain",
    """
extern "C" __global__ void plain(const float* x, float* total, float* out) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i] * 2.0f;
    if (i == 0) *total += 1.0f;
}
""",
)


def choice_program(requires: str = "sm_90a", delay: int = 20) -> CompiledProgram:
    """out = 2 * x, twice; the state `total` is the number of kernels so far. `delay` is in microseconds or so."""
    x, out, total, updated = (
        BufferSpec(name, FLOAT32, FLOAT32, dense(shape))
        for name, shape in (("x", (COUNT,)), ("out", (COUNT,)), ("total", (1,)), ("updated", (1,)))
    )
    buffers = (
        Buffer(Role.INPUT, "x", x.nbytes),
        Buffer(Role.INPUT, "total", total.nbytes),
        Buffer(Role.OUTPUT, "out", out.nbytes),
    )
    args = (Argument(0, 0), Argument(1, 0, writes=True), Argument(2, 0, writes=True))
    shape = ((COUNT // _BLOCK, 1, 1), (_BLOCK, 1, 1))
    slow = KernelCall("double", 0, args, struct.pack("<I", delay), *shape, extension=cluster_along_x(2))
    quick = KernelCall("double", 1, args, b"", *shape)
    step = CallChoice((CallOption(requires, (slow,)), CallOption("", (quick,))))
    plan = ExecutionPlan(
        buffers, (CLUSTERED, PLAIN), (step, step), (x, total), (out, updated), state=(("updated", "total"),)
    )
    return CompiledProgram("cuda", "doubled", "float16", {"main": plan}, ())
