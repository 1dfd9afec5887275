"""The device's side of `benchmarks.llm`, in a process of its own, so that its memory is the runtime's alone.

``python -m benchmarks.llm_device FOLDER OUTPUT.npz``: takes a prompt, then the likeliest token at each step. The file
gets the logits of the prompt's last token and of each step, and what was measured.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np

import npu_compiler
from npu_cli.timing import timed
from npu_compiler.artifact.generation_spec import GenerationSpec
from npu_runtime import Device, NPUBuffer
from npu_text.language_model import LanguageModel
from npu_text.step_functions import ProgramFunctions, Tensor, partition_functions

_COMPILE_RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm_device")
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--partitioned", action="store_true", help="through partition and DAGExecutor")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    spec = GenerationSpec.load(args.folder)
    device = Device(args.device)
    plans = partition_functions(args.folder, device.target) if args.partitioned else None
    model, load = timed(lambda: LanguageModel(args.folder, device, plans=plans))
    _, prepare = timed(lambda: [model.step(length) for length in model.lengths])
    prompt = np.random.default_rng(0).integers(0, spec.vocabulary, args.prompt).tolist()
    sequence = model.begin()
    logits, prefill = timed(lambda: sequence.advance(prompt))
    rows, seconds = [_row(logits)], []
    for _ in range(args.steps):
        started = perf_counter()
        logits = sequence.advance([int(rows[-1].argmax())])
        rows.append(_row(logits))
        seconds.append(perf_counter() - started)
    weights = (args.folder / spec.weights).stat().st_size
    peak = _peak_memory()
    figures = {
        "device": device.backend.name,
        "load, s": load,
        "prepare kernels, s": prepare,
        "prefill, s": prefill,
        "prefill, tokens/s": args.prompt / prefill,
        "decode, tokens/s": 1 / median(seconds),
        "weights, bytes": weights,
        "peak memory, bytes": peak,
        "peak memory, ratio to weights": peak / weights,
    }
    if isinstance(model.functions, ProgramFunctions):
        compiled = model.functions.program.functions
        figures |= {f"dispatches, {name}": len(plan.calls) for name, plan in compiled.items()}
        figures["weights on the device, ratio"] = model.functions.weights.nbytes / weights
        figures["compile decode IR to bytes, s of one core"] = _compile_seconds(
            args.folder / "decode.json", device.target
        )
    np.savez(args.output, logits=np.stack(rows), tokens=np.array(sequence.tokens), figures=json.dumps(figures))


def _row(logits: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    array = logits.to_numpy() if isinstance(logits, NPUBuffer) else logits
    return array.astype(np.float32).reshape(-1)


def _compile_seconds(ir: Path, target: str) -> float:
    seconds = []
    for _ in range(_COMPILE_RUNS):
        started = process_time()
        npu_compiler.compile(ir, target).to_bytes()
        seconds.append(process_time() - started)
    return median(seconds)


def _peak_memory() -> int:
    """The most memory this process had, files that it maps included, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # On Linux the resource usage starts with the peak of the process that this one was started from.
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
