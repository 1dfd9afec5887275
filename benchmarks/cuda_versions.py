"""This tree's programs beside another's on a CUDA device, timed in turns, so that both see the same machine.

Run it as ``python -m benchmarks.cuda_versions FOLDER``, with the sources of another version in FOLDER; ``--json``
writes the figures to a file. Each tree has a process of its own, which compiles, tunes and checks its programs and then
waits; the processes replay one after the other, and none while another does. What is compared is the device's time of a
replay.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

_ROUNDS = 9
_SECONDS = 0.15  # of replays, each time that it is a program's turn
_IMAGES = {"resnet18": (1, 64), "resnet50": (1, 8, 64, 256)}
_STEPS = {"decode 2048": (1, 2048), "decode 32768": (1, 32768), "prefill 128": (128, 2048), "prefill 512": (512, 2048)}
_STEPS |= {"prefill 2048": (2048, 2048), "prefill 8192": (8192, 8192)}

Replays = dict[str, tuple[Callable[[], object], int]]
"""What runs a program once more, and the stream that it runs on, by the row that shows its time."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_versions", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("other", type=Path, metavar="FOLDER", help="the sources of the version to compare with")
    parser.add_argument("--graphs", type=Path, required=True, metavar="FOLDER", help="where extracted graphs are kept")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    here = Path(__file__).parents[1]
    trees = {"this": here, "other": args.other.resolve()}
    workers = {name: _Worker(tree, args.graphs.resolve() / name) for name, tree in trees.items()}
    figures = {}
    for row in workers["this"].rows() and workers["other"].rows():
        turns: dict[str, list[float]] = {name: [] for name in workers}
        for number in range(_ROUNDS):
            for name in sorted(workers, reverse=bool(number % 2)):
                turns[name].append(workers[name].milliseconds(row))
        figures[row] = {name: float(median(times)) for name, times in turns.items()}
        figures[row]["ratio"] = figures[row]["this"] / figures[row]["other"]
        print(f"{row:16} " + "  ".join(f"{name} {value:8.4f}" for name, value in figures[row].items()), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(figures, indent=2) + "\n")
    for worker in workers.values():
        worker.close()


class _Worker:
    """A process that runs the programs of one tree; it prepares them while another prepares its own."""

    def __init__(self, tree: Path, graphs: Path) -> None:
        graphs.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-P", __file__, "--serve", str(graphs)]
        self._process = subprocess.Popen(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, text=True, stdin=-1, stdout=-1
        )
        self._rows: list[str] | None = None

    def rows(self) -> list[str]:
        if self._rows is None:
            self._rows = self._read()
        return self._rows

    def milliseconds(self, row: str) -> float:
        assert self._process.stdin is not None
        print(row, file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with exit status {self._process.wait()}")
        return json.loads(line)


def _serve(graphs: Path) -> None:
    """Prepares every program, says which there are, then times those that it is told to."""
    answers, sys.stdout = sys.stdout, sys.stderr
    replays = _images() | _steps(graphs)
    print(json.dumps(list(replays)), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_timed(*replays[line.strip()])), file=answers, flush=True)


def _images() -> Replays:
    import torch

    from benchmarks.cuda_resnet import compiled_resnet, images_of
    from cuda_runtime import CUDAExecutor
    from npu_runtime import Device

    replays: Replays = {}
    device = Device("cuda")
    for name, batches in _IMAGES.items():
        for batch in batches:
            images = images_of(batch)
            module, program, weights = compiled_resnet(name, images, device)
            executor = CUDAExecutor(program, device, tune=True)
            given = torch.from_numpy(images).cuda().half().contiguous(memory_format=torch.channels_last)
            output = executor.run({program.input_specs[0].name: given}, weights)[program.output_specs[0].name]
            with torch.inference_mode():
                wanted = module.cuda()(torch.from_numpy(images).cuda()).flatten().cpu().double()
            _check(torch.from_numpy(output.to_numpy()).flatten().double(), wanted)
            replays[f"{name}, {batch}"] = executor.replay, executor.stream
    return replays


def _steps(graphs: Path) -> Replays:
    from torch.utils.dlpack import from_dlpack

    from benchmarks.cuda_qwen import Qwen, Step, bound, logits
    from cuda_runtime import CUDAExecutor
    from npu_runtime import Device, load_weights

    device, qwen = Device("cuda"), Qwen()
    steps = {name: Step(*sizes) for name, sizes in _STEPS.items()}
    program = qwen.compiled(list(steps.values()), graphs)
    weights = load_weights(qwen.weights(), program, device)
    replays: Replays = {}
    for name, step in steps.items():
        inputs = qwen.inputs(step)
        if step.tokens == 1:
            inputs["positions"].fill_(step.cache - 48)
        executor = CUDAExecutor(program, device, step.function, tune=True)
        output = executor.run(bound(executor.plan, inputs), weights)[executor.plan.outputs[0].name]
        _check(from_dlpack(output).flatten().double().cpu(), logits(qwen.model, inputs).flatten().double().cpu())
        replays[name] = executor.replay, executor.stream
    return replays


def _check(output: Any, wanted: Any) -> None:
    import torch

    r = float(torch.corrcoef(torch.stack([output, wanted.detach()]))[0, 1])
    if not r > 0.99:
        raise SystemExit(f"an output and PyTorch's have a Pearson r of {r}, expected more than 0.99")


def _timed(replay: Callable[[], object], stream: int) -> float:
    """Milliseconds of a replay by events around several, after some to warm up."""
    import torch

    on = torch.cuda.ExternalStream(stream)

    def several(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(on)
        for _ in range(count):
            replay()
        end.record(on)
        end.synchronize()
        return float(start.elapsed_time(end)) / count

    one = several(3)
    return several(max(5, int(_SECONDS * 1e3 / one)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(Path(sys.argv[2]))
    else:
        main()
