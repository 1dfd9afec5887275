"""What a call through the software GPU's process costs: command buffers with one kernel that does next to nothing.

Run it as ``python -m benchmarks.software_gpu_calls``. "posting" is a command that was recorded before, to the process
and back. "whole" is a command buffer from its making to its end, with what Python spends on encoding it. "program" is
`Executor.run` of a compiled program with one kernel, on a buffer that is on the device.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

import npu_compiler
from npu_runtime import Device, Executor, NPUBuffer
from software_gpu import metal
from software_gpu.device_process import isolation, run_commands
from software_gpu.native_runtime import CommandKind, CommandRecord

_SOURCE = """
#include <metal_stdlib>
using namespace metal;
kernel void touch(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] += 1.0f; }
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.software_gpu_calls", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--pause", type=float, default=0.002, help="seconds between calls that come seldom")
    args = parser.parse_args()
    device = metal.create_device()
    print("kernels run", isolation())
    for name, call in (("posting", _poster(device)), ("whole", _encoder(device)), ("program", _program())):
        _print(f"{name}, one after another", _times(call, args.calls, 0.0))
        _print(f"{name}, {args.pause * 1e3:g} ms apart", _times(call, args.calls // 10, args.pause))


def _encoder(device: metal.MTLDevice) -> Callable[[], None]:
    library, error = device.newLibraryWithSource_options_error_(_SOURCE, None, None)
    if library is None:
        raise SystemExit(str(error))
    function = library.newFunctionWithName_("touch")
    assert function is not None
    pipeline, _ = device.newComputePipelineStateWithFunction_error_(function, None)
    assert pipeline is not None
    queue, buffer = device.newCommandQueue(), device.newBufferWithLength_options_(4096, 0)

    def call() -> None:
        command_buffer = queue.commandBuffer()
        encoder = command_buffer.computeCommandEncoder()
        encoder.setComputePipelineState_(pipeline)
        encoder.setBuffer_offset_atIndex_(buffer, 0, 0)
        encoder.dispatchThreadgroups_threadsPerThreadgroup_((1, 1, 1), (32, 1, 1))
        encoder.endEncoding()
        command_buffer.commit()
        command_buffer.waitUntilCompleted()

    return call


def _poster(device: metal.MTLDevice) -> Callable[[], None]:
    """Posts commands that were recorded once."""
    buffer = device.newBufferWithLength_options_(64, 0)
    records = (CommandRecord * 1)(CommandRecord(kind=CommandKind.FILL, target=buffer.address, bytes=64))
    return lambda: _ran(run_commands(records))


def _program() -> Callable[[], object]:
    """Runs a program of one kernel."""
    import torch

    with tempfile.TemporaryDirectory(prefix="npu-benchmark-") as folder:
        ir = Path(folder, "relu.json")
        npu_compiler.extract(torch.nn.ReLU().eval(), torch.zeros(1, 64), ir)
        device = Device("software-metal")
        program = npu_compiler.compile(ir, target=device.target)
    executor, spec = Executor(program, device), program.input_specs[0]
    inputs = {spec.name: NPUBuffer.from_numpy(np.zeros((1, 64), np.float32), device, spec=spec)}
    return lambda: executor.run(inputs)


def _ran(failure: object) -> None:
    if failure is not None:
        raise SystemExit(str(failure))


def _times(call: Callable[[], object], count: int, pause: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    seconds = np.zeros(count)
    for _ in range(20):
        call()
    for index in range(count):
        if pause:
            sleep(pause)
        started = perf_counter()
        call()
        seconds[index] = perf_counter() - started
    return seconds


def _print(what: str, seconds: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    quick, middle, late = np.percentile(seconds * 1e6, [5, 50, 99])
    print(
        f"{what}: {quick:.1f} µs where no other work is in the way, {middle:.1f} µs in the middle, "
        f"{late:.1f} µs for 1 in 100"
    )


if __name__ == "__main__":
    main()
