"""What a caller waits for on a CUDA device, beside ``torch.compile(mode="reduce-overhead")`` called as a user calls it.

Run it as ``python -m benchmarks.cuda_calls``; ``--json`` adds the figures to a file. All times are wall clock, in
milliseconds: calls one after another (the next is asked for without waiting), calls that are waited for, and from an
array in host memory to the result there. Outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median, quantiles
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import cuda_timing
from benchmarks.cuda_resnet import compiled_resnet, images_of
from cuda_runtime import CUDAExecutor
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, NPUBuffer
from npu_runtime.weight_loader import Weights

_WORKLOADS = (("resnet18", 1), ("resnet50", 1), ("resnet50", 8), ("resnet50", 64))
_KEYS = ("model", "batch")
_CALLS = 200
_IN_A_ROW = 20
_STREAMS = 4
_OVERLAPPING_CALLS = 1000  # of each stream; few are over before all of the threads have begun


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_calls", description=(__doc__ or "").split("\n")[0])
    cuda_timing.add_arguments(parser, peers=())
    parser.add_argument("--without-torch", action="store_true", help="leave torch.compile out")
    parser.add_argument("--models", nargs="+", choices=sorted({name for name, _ in _WORKLOADS}), help="these only")
    parser.add_argument("--batches", nargs="+", type=int, help="these only")
    args = parser.parse_args()
    device = Device("cuda")
    bus = bus_rate()
    run: dict[str, Any] = {"machine": cuda_timing.machine(device), "tuned": args.tune, "results": []}
    run["ceilings"] = {"bus to the device, GB/s": bus}
    for name, batch in _WORKLOADS:
        if name not in (args.models or [name]) or batch not in (args.batches or [batch]):
            continue
        run["results"].append(_measure(name, batch, device, bus, args))
        cuda_timing.write_run(args.json, run, _KEYS)
    cuda_timing.print_table(run, _KEYS)


def _measure(name: str, batch: int, device: Device, bus: float, args: argparse.Namespace) -> dict[str, Any]:
    images = images_of(batch)
    module, program, weights = compiled_resnet(name, images, device)
    executor = CUDAExecutor(program, device, tune=args.tune)
    (given,), (made,) = program.input_specs, program.output_specs
    on_device = torch.from_numpy(images).cuda().half().contiguous(memory_format=torch.channels_last)
    inputs = {given.name: on_device}
    result = executor.run(inputs, weights)[made.name].to_numpy()
    arrays = executor.compute({given.name: images}, weights)[made.name]
    np.testing.assert_allclose(arrays, result, atol=np.abs(result).max() * 2e-2)
    figures: dict[str, Any] = {"model": name, "batch": batch}
    figures["device"] = cuda_timing.milliseconds(executor.replay, executor.stream)
    figures |= _times("npu", lambda: executor.run(inputs, weights, sync=False), torch.cuda.synchronize, row=True)
    figures |= _times("npu waiting", lambda: executor.run(inputs, weights))
    figures |= _times("npu arrays", lambda: executor.compute({given.name: images}, weights))
    figures |= _times("npu buffers", lambda: _by_buffers(executor, images, device, weights))
    figures["arrays, floor"] = figures["device"] + (images.nbytes + arrays.nbytes) / bus / 1e6
    if batch == 1:
        figures["4 streams over one"] = _overlap(program, device, inputs, weights)
    if not args.without_torch:
        figures |= _torch_times(module, on_device, images, result)
    return figures


def _by_buffers(executor: CUDAExecutor, images: NDArray[Any], device: Device, weights: Weights) -> NDArray[Any]:
    (spec,) = executor.plan.inputs
    outputs = executor.run({spec.name: NPUBuffer.from_numpy(images, device, spec)}, weights)
    return next(iter(outputs.values())).to_numpy()


def _torch_times(
    module: torch.nn.Module, on_device: torch.Tensor, images: NDArray[Any], wanted: NDArray[Any]
) -> dict[str, Any]:
    network = module.cuda().half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch._dynamo.reset()
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(network, mode="reduce-overhead")

    def arrays() -> NDArray[Any]:
        given = torch.from_numpy(images).cuda().half().contiguous(memory_format=torch.channels_last)
        result: NDArray[Any] = compiled(given).float().cpu().numpy()
        return result

    def waiting() -> None:
        compiled(on_device)
        torch.cuda.synchronize()

    with torch.inference_mode():
        for _ in range(4):
            found = compiled(on_device)
        np.testing.assert_allclose(found.float().cpu().numpy(), wanted, atol=np.abs(wanted).max() * 5e-2)
        figures = _times("torch", lambda: compiled(on_device), torch.cuda.synchronize, row=True)
        figures |= _times("torch waiting", waiting)
        return figures | _times("torch arrays", arrays)


def _times(
    what: str, call: Callable[[], object], wait: Callable[[], None] | None = None, *, row: bool = False
) -> dict[str, float]:
    """Median and 99th percentile of a call's wall clock in milliseconds; in a row, of the mean of several."""
    for _ in range(30):
        call()
    if wait is not None:
        wait()
    times = []
    for _ in range(_CALLS // (_IN_A_ROW if row else 1)):
        started = perf_counter()
        for _ in range(_IN_A_ROW if row else 1):
            call()
        if wait is not None:
            wait()
        times.append((perf_counter() - started) * 1e3 / (_IN_A_ROW if row else 1))
    return {what: median(times), f"{what}, p99": quantiles(times, n=100)[98]}


def _overlap(program: CompiledProgram, device: Device, inputs: dict[str, Any], weights: Weights) -> float:
    """Throughput of executors on several streams, which choose for that, over that of one alone."""

    def seconds(executors: list[CUDAExecutor]) -> float:
        def work(executor: CUDAExecutor) -> None:
            for _ in range(_OVERLAPPING_CALLS):
                executor.run(inputs, weights, sync=False)

        for executor in executors:
            for _ in range(5):
                executor.run(inputs, weights)
        torch.cuda.synchronize()
        started = perf_counter()
        threads = [Thread(target=work, args=(executor,)) for executor in executors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        return (perf_counter() - started) / len(executors)

    alone = CUDAExecutor(program, device.sibling())
    executors = [CUDAExecutor(program, device.sibling(_STREAMS)) for _ in range(_STREAMS)]
    return seconds([alone]) / seconds(executors)


def bus_rate() -> float:
    """Gigabytes a second from pinned memory to the device."""
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    return host.nbytes / cuda_timing.milliseconds(lambda: there.copy_(host, non_blocking=True)) / 1e6


if __name__ == "__main__":
    main()
