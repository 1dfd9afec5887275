"""What a mixed plan costs beyond its device, its CPU and its bytes: microseconds for a partition and for a transfer.

Run it as ``python -m benchmarks.mixed_calls --device software-metal`` or ``--device cuda``; ``--json`` writes the
figures to a file. The plans are chains of products on the device with sigmoids between them that a callback leaves to
the CPU, on tensors of 8 x 64: longer ones have more partitions, wider ones more transfers for each, and in residual
ones partitions on the device read what earlier ones made.

A call is `DAGExecutor.execute`, from arrays to arrays. Taken off it are the device's time (what each run of a program
takes in the call; on a device that runs ahead of the host, what replays of it in a row take), the CPU's (the same calls
of PyTorch, made directly), and the bytes (at the rate of a large copy). What is left is divided between partitions and
transfers by least squares over all plans.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import npu_compiler
from npu_compiler.partitioner import Partition, PartitionPlan
from npu_runtime import DAGExecutor, Device, Executor, NPUBuffer, load_weights
from npu_runtime.backend import DeviceBuffer, PreparedPlan

_ROWS, _SIZE = 8, 64
_PLANS = (
    (1, 1, False),
    (4, 1, False),
    (8, 1, False),
    (4, 1, True),
    (1, 4, False),
    (4, 4, False),
    (8, 4, False),
    (4, 4, True),
)
_ON_CPU = "aten.sigmoid.default"
_MOST_A_PARTITION, _MOST_A_TRANSFER = 30.0, 10.0
_IN_A_ROW = 100
_ROUNDS = 10


class Chain(torch.nn.Module):
    """`width` tensors side by side: a product and a sigmoid each, `stages` times, and a product at the end.

    With `residual`, what goes into a stage is added to what comes out, so that tensors are read on both sides.
    """

    def __init__(self, stages: int, width: int, residual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages, self.width, self.residual = stages, width, residual
        self.weight = torch.nn.Parameter(torch.randn(_SIZE, _SIZE) / _SIZE**0.5)

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        found = list(tensors)
        for _ in range(self.stages):
            made = [torch.sigmoid(x @ self.weight) for x in found]
            found = [x + y for x, y in zip(found, made, strict=True)] if self.residual else made
        return [x @ self.weight for x in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mixed_calls", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", default="software-metal")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the ops are too small to share
    device = Device(args.device)
    plans = [_Measured(Chain(*plan), device) for plan in _PLANS]
    for _ in range(_ROUNDS):  # in turns, so that a machine that slows down does so for all of them
        for plan in plans:
            plan.run(args.calls // _ROUNDS)
    rows = [plan.row() for plan in plans]
    counts = np.array([[row["partitions"], row["transfers"]] for row in rows], float)
    (partition, transfer), *_ = np.linalg.lstsq(counts, np.array([row["overhead"] for row in rows]), rcond=None)
    print(f"{partition:.1f} µs a partition (at most {_MOST_A_PARTITION:g}), ", end="")
    print(f"{transfer:.1f} µs a transfer (at most {_MOST_A_TRANSFER:g})")
    if args.json is not None:
        figures = {"device": device.backend.name, "unit": "microseconds", "partition": partition, "transfer": transfer}
        args.json.write_text(json.dumps({**figures, "plans": rows}, indent=2) + "\n")


class _Measured:
    """A plan ready to run, and how long its calls took."""

    def __init__(self, model: Chain, device: Device) -> None:
        self._residual, self._device = model.residual, device
        tensors = [torch.randn(_ROWS, _SIZE) for _ in range(model.width)]
        extraction = npu_compiler.extract(model.eval(), tuple(tensors))
        self._weights = extraction.weights
        self._plan = npu_compiler.partition(extraction.ir, lambda op: op != _ON_CPU, target=device.target)
        with _timed_plans(device) as self._on_device:
            self._executor = DAGExecutor(self._plan, device)
        self._executor.load_weights(extraction.weights)
        named = zip(self._plan.inputs, tensors, strict=True)
        self._inputs = {spec.name: tensor.numpy() for spec, tensor in named}
        _check(self._executor.execute(self._inputs).values(), model(*tensors))
        self._on_host: list[float] = []
        self._waited: list[float] = []
        self._of_torch: list[float] = []

    def run(self, calls: int) -> None:
        """Times so many calls, and as many of PyTorch's own beside them."""
        for _ in range(calls):
            self._on_device.seconds = 0.0
            started = perf_counter()
            self._executor.execute(self._inputs)
            self._on_host.append(perf_counter() - started - self._on_device.seconds)
            self._waited.append(self._on_device.seconds)
        self._of_torch += _torch_seconds(self._plan, calls)

    def row(self) -> dict[str, Any]:
        """The figures, printed as well."""
        on_device, on_host = _undisturbed(self._waited), _undisturbed(self._on_host)
        if self._device.backend.runs_ahead:
            parts = [part for part in self._plan.partitions if part.on_device]
            on_device = sum(_replay(part, self._device, self._weights) for part in parts)
            on_host -= on_device
        figures = _row(self._plan, on_host, on_device, _undisturbed(self._of_torch))
        row = {"residual": self._residual} | figures
        print(
            f"{row['partitions']:3} partitions, {row['transfers']:3} transfers: {row['call']:7.1f} µs a call, device "
            f"{row['on device']:6.1f}, CPU {row['on CPU']:6.1f}, bytes {row['bytes']:4.1f}; beyond them "
            f"{row['overhead']:7.1f} of at most {row['allowed']:6.1f}" + (", residual" if self._residual else "")
        )
        return row


def _row(plan: PartitionPlan, on_host: float, on_device: float, on_cpu: float) -> dict[str, Any]:
    """Figures of a plan, in microseconds.

    Args:
        plan: The plan.
        on_host: Seconds of a call that the device is not waited for.
        on_device: Seconds that it is.
        on_cpu: Seconds of the calls of PyTorch in it.
    """
    crossing = plan.bytes_moved / _copy_rate()
    parts, transfers = len(plan.partitions), len(plan.transfers)
    return {
        "partitions": parts,
        "transfers": transfers,
        "call": (on_host + on_device) * 1e6,
        "on device": on_device * 1e6,
        "on CPU": on_cpu * 1e6,
        "bytes": crossing * 1e6,
        "overhead": (on_host - on_cpu - crossing) * 1e6,
        "allowed": _MOST_A_PARTITION * parts + _MOST_A_TRANSFER * transfers,
    }


class _TimedPlan(PreparedPlan):
    """A prepared plan that adds up the seconds in which it runs."""

    def __init__(self, plan: PreparedPlan, times: _Times) -> None:
        self._plan, self._times = plan, times

    def run(self, buffers: Sequence[DeviceBuffer]) -> None:
        started = perf_counter()
        self._plan.run(buffers)
        self._times.seconds += perf_counter() - started

    def run_timed(self, buffers: Sequence[DeviceBuffer]) -> list[float]:
        return self._plan.run_timed(buffers)


@dataclass
class _Times:
    """The seconds of plans that were run."""

    seconds: float = 0.0


@contextmanager
def _timed_plans(device: Device) -> Iterator[_Times]:
    """Times the plans that are made ready within the block; none where the device runs ahead of the host."""
    times, prepare = _Times(), device.backend.prepare
    if not device.backend.runs_ahead:
        device.backend.prepare = lambda plan: _TimedPlan(prepare(plan), times)  # type: ignore[method-assign]
    try:
        yield times
    finally:
        device.backend.prepare = prepare  # type: ignore[method-assign]


def _replay(part: Partition, device: Device, weights: Any) -> float:
    """Seconds of a partition's program on memory that it was bound to before, of many without waiting between them."""
    program = npu_compiler.compile(part.ir, device.target)
    executor, loaded = Executor(program, device), load_weights(weights, program, device)
    inputs = {
        spec.name: NPUBuffer.from_numpy(np.zeros(spec.shape, np.float32), device, spec) for spec in program.input_specs
    }
    recording = device.backend.record([executor.bind(inputs, executor.run(inputs, loaded), loaded)])
    recording.launch()()
    started = perf_counter()
    for _ in range(_IN_A_ROW):
        wait = recording.launch()
    wait()
    return (perf_counter() - started) / _IN_A_ROW


def _torch_seconds(plan: PartitionPlan, calls: int) -> list[float]:
    """Seconds of the calls of PyTorch in a plan, made directly."""
    tensors = [torch.randn(_ROWS, _SIZE) for part in plan.partitions if not part.on_device for _ in part.nodes]
    op: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.sigmoid.default
    seconds = []
    for _ in range(calls):
        started = perf_counter()
        for tensor in tensors:
            op(tensor)
        seconds.append(perf_counter() - started)
    return seconds


def _undisturbed(seconds: Sequence[float]) -> float:
    """What a call takes where no other work is in its way: the 10th percentile."""
    return float(np.percentile(seconds, 10))


def _copy_rate() -> float:
    """Bytes that one processor copies in a second."""
    source = np.ones(1 << 24, np.uint8)
    target = np.zeros_like(source)
    seconds = []
    for _ in range(5):
        started = perf_counter()
        np.copyto(target, source)
        seconds.append(perf_counter() - started)
    return source.nbytes / min(seconds)


def _check(given: Any, wanted: Sequence[torch.Tensor]) -> None:
    for result, expected in zip(given, wanted, strict=True):
        np.testing.assert_allclose(result, expected.detach().numpy(), atol=2e-2)


if __name__ == "__main__":
    main()
