"""Steps of Qwen2.5-1.5B on a CUDA device, beside PyTorch in the same process on the same weights.

Run it as ``python -m benchmarks.cuda_llm``; ``--json`` adds the figures to a file. Outputs are compared with PyTorch in
float32 before anything is timed. PyTorch runs in bfloat16 with a cache that is updated in place: eager, eager captured
in a CUDA graph, and torch.compile captured in one. ``--sweep`` times the decode steps at many more positions, beside
those that are captured, and adds them to a file of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from benchmarks import cuda_timing
from benchmarks.cuda_qwen import Qwen, Reference, Step, accuracy, bound, logits
from cuda_runtime import CUDAExecutor
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, load_weights
from npu_runtime.weight_loader import Weights

Workloads = dict[Step, tuple[int, ...]]
"""Steps, and the positions of their first token to measure them at."""

_WORKLOADS: Workloads = {
    Step(1, 2048): (128, 2000),
    Step(1, 32768): (128, 32000),
    Step(128, 2048): (0,),
    Step(512, 2048): (0,),
    Step(2048, 2048): (0,),
    Step(8192, 8192): (0,),
}
_SWEEP: Workloads = {
    Step(1, 2048): (1, *range(128, 2048, 128), 2047),
    Step(1, 32768): (1, 128, 512, 1024, 2048, *range(4096, 32768, 4096), 32640),
}
_KEYS = ("workload", "position")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_llm", description=(__doc__ or "").split("\n")[0])
    names = [step.function for step in _WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--sweep", type=Path, metavar="FILE", help="time many positions, too, and add them to this file"
    )
    parser.add_argument("--graphs", type=Path, metavar="FOLDER", help="where extracted graphs are kept between runs")
    cuda_timing.add_arguments(parser, ("eager", "captured", "compiled"))
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    steps = [step for step in _WORKLOADS if step.function in (args.workloads or names)]
    device = Device("cuda")
    ceilings = cuda_timing.ceilings(torch.bfloat16)
    qwen = Qwen()
    program = qwen.compiled(steps, args.graphs)
    bench = _Bench(qwen, program, load_weights(qwen.weights(), program, device), device, ceilings)
    run, sweep = (cuda_timing.empty_run(device, ceilings, args.tune) for _ in range(2))
    prepared = {}
    for step in steps:
        prepared[step] = bench.prepare(step, args)
        run["results"] += bench.rows(prepared[step], _WORKLOADS[step], args.peers)
        cuda_timing.write_run(args.json, run, _KEYS)
    captured = [peer for peer in args.peers if peer != "eager"]
    for step in steps if args.sweep is not None else ():
        if step in _SWEEP:
            sweep["results"] += bench.rows(prepared[step], _SWEEP[step], captured)
            cuda_timing.write_run(args.sweep, sweep, _KEYS)
    for measured in (run, sweep):
        cuda_timing.print_table(measured, _KEYS)


@dataclass(frozen=True)
class _Prepared:
    """A step ready to run at any position, by this project and by its peers, all on the same inputs."""

    step: Step
    inputs: dict[str, Any]
    executor: CUDAExecutor
    peers: cuda_timing.Peers


class _Bench:
    """What all workloads share."""

    def __init__(
        self, qwen: Qwen, program: CompiledProgram, weights: Weights, device: Device, ceilings: dict[str, float]
    ) -> None:
        self._qwen, self._program, self._weights, self._device = qwen, program, weights, device
        self._ceilings = ceilings
        self._reference = Reference(qwen.model)

    def prepare(self, step: Step, args: argparse.Namespace) -> _Prepared:
        inputs = self._qwen.inputs(step)
        executor = CUDAExecutor(self._program, self._device, step.function, tune=args.tune)
        peers = cuda_timing.Peers(args.peers, logits, (self._qwen.model, inputs), args.limit)
        return _Prepared(step, inputs, executor, peers)

    def rows(self, prepared: _Prepared, positions: Iterable[int], peers: list[str]) -> list[dict[str, Any]]:
        """Figures of a step at each position; times in milliseconds."""
        return [self._row(prepared, position, peers) for position in positions]

    def _row(self, prepared: _Prepared, position: int, peers: list[str]) -> dict[str, Any]:
        step, inputs, executor = prepared.step, prepared.inputs, prepared.executor
        inputs["positions"].copy_(position + torch.arange(step.tokens))
        wanted = self._reference.logits(inputs)
        compared = partial(accuracy, wanted=wanted)
        output = executor.run(bound(executor.plan, inputs), self._weights)[executor.plan.outputs[0].name]
        launches = len(executor.plan.calls)
        figures: dict[str, Any] = {"workload": step.function, "position": position, "launches": launches}
        figures |= compared(from_dlpack(output))
        second, best = np.sort(wanted)[-2:]
        figures["gap of the best two"] = float(best - second)
        figures |= cuda_timing.repeated_milliseconds(executor.replay, executor.stream)
        moved, done = self._qwen.nbytes(step, position), self._qwen.flops(step, position)
        figures |= cuda_timing.shares(figures["npu"], moved, done, self._ceilings)
        figures |= prepared.peers.figures(peers, compared)
        return figures | cuda_timing.best_peer(figures)


if __name__ == "__main__":
    main()
