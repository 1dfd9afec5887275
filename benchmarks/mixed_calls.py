"""What a mixed plan costs beyond its device, its CPU and its bytes: microseconds for a partition and for a transfer.

Run it as ``python -m benchmarks.mixed_calls --device software-metal`` or ``--device cuda``; ``--json`` writes the
figures to a file. The plans are chains of products on the device with sigmoids between them that a callback leaves to
the CPU, on tensors of 8 x 64: longer ones have more partitions, wider ones more transfers for each.

A call is `DAGExecutor.execute`, from arrays to arrays. Taken off it are the device's time (the same plans, bound to
their memory before, replayed), the CPU's (the same calls of PyTorch, made directly), and the bytes (at the rate of a
large copy). What is left is divided between partitions and transfers by least squares over all plans.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import npu_compiler
from npu_compiler.partitioner import Partition, PartitionPlan
from npu_runtime import DAGExecutor, Device, Executor, NPUBuffer, load_weights
from npu_runtime.backend import BoundPlan

_ROWS, _SIZE = 8, 64
_PLANS = ((1, 1), (4, 1), (8, 1), (1, 4), (4, 4), (8, 4))
_ON_CPU = "aten.sigmoid.default"
_MOST_A_PARTITION, _MOST_A_TRANSFER = 30.0, 10.0
_IN_A_ROW = 100


class Chain(torch.nn.Module):
    """`width` tensors side by side: a product and a sigmoid each, `stages` times, and a product at the end."""

    def __init__(self, stages: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages, self.width = stages, width
        self.weight = torch.nn.Parameter(torch.randn(_SIZE, _SIZE) / _SIZE**0.5)

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        found = list(tensors)
        for _ in range(self.stages):
            found = [torch.sigmoid(x @ self.weight) for x in found]
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
    rows = [_measure(stages, width, device, args.calls) for stages, width in _PLANS]
    counts = np.array([[row["partitions"], row["transfers"]] for row in rows], float)
    (partition, transfer), *_ = np.linalg.lstsq(counts, np.array([row["overhead"] for row in rows]), rcond=None)
    print(f"{partition:.1f} µs a partition (at most {_MOST_A_PARTITION:g}), ", end="")
    print(f"{transfer:.1f} µs a transfer (at most {_MOST_A_TRANSFER:g})")
    if args.json is not None:
        figures = {"device": device.backend.name, "unit": "microseconds", "partition": partition, "transfer": transfer}
        args.json.write_text(json.dumps({**figures, "plans": rows}, indent=2) + "\n")


def _measure(stages: int, width: int, device: Device, calls: int) -> dict[str, Any]:
    tensors = [torch.randn(_ROWS, _SIZE) for _ in range(width)]
    model = Chain(stages, width).eval()
    extraction = npu_compiler.extract(model, tuple(tensors))
    plan = npu_compiler.partition(extraction.ir, lambda op: op != _ON_CPU, target=device.target)
    executor = DAGExecutor(plan, device)
    executor.load_weights(extraction.weights)
    inputs = {spec.name: tensor.numpy() for spec, tensor in zip(plan.inputs, tensors, strict=True)}
    _check(executor.execute(inputs).values(), model(*tensors))
    pieces = [_piece(part, device, extraction.weights) for part in plan.partitions]
    whole, *apart = _alternating([lambda: executor.execute(inputs), *pieces], calls)
    if device.backend.runs_ahead:
        apart = [
            seconds if isinstance(piece, _OnCPU) else piece.in_a_row()
            for piece, seconds in zip(pieces, apart, strict=True)
        ]
    row = _row(plan, whole, pieces, apart)
    print(
        f"{row['partitions']:3} partitions, {row['transfers']:3} transfers: {row['call']:7.1f} µs a call, device "
        f"{row['on device']:6.1f}, CPU {row['on CPU']:6.1f}, bytes {row['bytes']:4.1f}; beyond them "
        f"{row['overhead']:7.1f} of at most {row['allowed']:6.1f}"
    )
    return row


def _row(
    plan: PartitionPlan, whole: float, pieces: Sequence[_OnCPU | _OnDevice], apart: Sequence[float]
) -> dict[str, Any]:
    """Figures of a plan, in microseconds."""
    on_cpu = sum(s for piece, s in zip(pieces, apart, strict=True) if isinstance(piece, _OnCPU)) * 1e6
    on_device = sum(apart) * 1e6 - on_cpu
    crossing = plan.bytes_moved / _copy_rate() * 1e6
    parts, transfers = len(plan.partitions), len(plan.transfers)
    return {
        "partitions": parts,
        "transfers": transfers,
        "call": whole * 1e6,
        "on device": on_device,
        "on CPU": on_cpu,
        "bytes": crossing,
        "overhead": whole * 1e6 - on_device - on_cpu - crossing,
        "allowed": _MOST_A_PARTITION * parts + _MOST_A_TRANSFER * transfers,
    }


class _OnCPU:
    """The calls of PyTorch that a partition makes, and nothing else."""

    def __init__(self, part: Partition) -> None:
        self._tensors = [torch.randn(_ROWS, _SIZE) for _ in part.nodes]
        self._op: Callable[[torch.Tensor], torch.Tensor] = torch.ops.aten.sigmoid.default

    def __call__(self) -> None:
        for tensor in self._tensors:
            self._op(tensor)


class _OnDevice:
    """A partition's program on memory that it was bound to before."""

    def __init__(self, bound: BoundPlan, device: Device) -> None:
        self._recording = device.backend.record([bound])

    def __call__(self) -> None:
        self._recording.launch()()

    def in_a_row(self) -> float:
        """Seconds of one of many that are asked for without waiting between them."""
        self()
        started = perf_counter()
        for _ in range(_IN_A_ROW):
            wait = self._recording.launch()
        wait()
        return (perf_counter() - started) / _IN_A_ROW


def _piece(part: Partition, device: Device, weights: Any) -> _OnCPU | _OnDevice:
    if not part.on_device:
        return _OnCPU(part)
    program = npu_compiler.compile(part.ir, device.target)
    executor, loaded = Executor(program, device), load_weights(weights, program, device)
    inputs = {
        spec.name: NPUBuffer.from_numpy(np.zeros(spec.shape, np.float32), device, spec) for spec in program.input_specs
    }
    return _OnDevice(executor.bind(inputs, executor.run(inputs, loaded), loaded), device)


def _alternating(calls: Sequence[Callable[[], object]], count: int) -> list[float]:
    """Seconds of each call where no other work is in the way: the 10th percentile, timed in turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(count):
        for call, found in zip(calls, seconds, strict=True):
            started = perf_counter()
            call()
            found.append(perf_counter() - started)
    return [float(np.percentile(found, 10)) for found in seconds]


def _copy_rate() -> float:
    """Bytes that one processor copies in a second."""
    source = np.ones(1 << 24, np.uint8)
    target = np.zeros_like(source)
    return source.nbytes / min(_alternating([lambda: np.copyto(target, source)], 5))


def _check(given: Any, wanted: Sequence[torch.Tensor]) -> None:
    for result, expected in zip(given, wanted, strict=True):
        np.testing.assert_allclose(result, expected.detach().numpy(), atol=2e-2)


if __name__ == "__main__":
    main()
