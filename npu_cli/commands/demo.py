"""`npu demo`: a ResNet from PyTorch to a device, and how close it comes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import npu_compiler
from npu_cli.extras import import_extra
from npu_cli.images import load_image, photograph, preprocess
from npu_cli.sample_models import SampleModel, resnet
from npu_cli.timing import median_time, timed
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from npu_runtime import Device, Executor, NPUBuffer, Weights, load_weights

__all__ = ["execute"]

_RUNS = 5
_INPUT_SIZE = 224


def execute(args: argparse.Namespace) -> int:
    path = args.image or photograph()
    image = preprocess(load_image(path), _INPUT_SIZE, _INPUT_SIZE)
    console = Console()
    with console.status("loading the model"):
        sample = resnet(args.model, args.weights)
    expected, eager_seconds = _run_eager(sample, image)
    with console.status("compiling and running it"):
        outcome = _run_compiled(sample, image, args)
    same = _show(console, path, sample, expected, eager_seconds, outcome)
    return 0 if same else 1


@dataclass(frozen=True)
class _Outcome:
    """What became of the model on the device; durations are in seconds."""

    program: CompiledProgram
    folder: Path
    device: Device
    logits: NDArray[Any]
    extract: float
    compile: float
    load: float
    run: float


def _run_eager(sample: SampleModel, image: NDArray[np.float32]) -> tuple[NDArray[Any], float]:
    torch = import_extra("torch", "examples")
    tensor = torch.from_numpy(image)
    with torch.no_grad():
        logits, seconds = median_time(lambda: sample.module(tensor), _RUNS)
    result: NDArray[Any] = logits[0].numpy()
    return result, seconds


def _run_compiled(sample: SampleModel, image: NDArray[np.float32], args: argparse.Namespace) -> _Outcome:
    torch = import_extra("torch", "examples")
    folder: Path = args.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to '{folder}': {error.strerror}; choose another with --output") from error
    ir = folder / f"{args.model}.json"
    example = torch.from_numpy(image)
    _, extract = timed(lambda: npu_compiler.extract(sample.module, example, ir, model_name=args.model))
    device = Device(args.device)
    program, compile_ = timed(lambda: npu_compiler.compile(ir, target=device.target))
    program.save(ir.with_suffix(".npubin"))

    def load() -> tuple[Executor, Weights]:
        return Executor(program, device), load_weights(ir.with_suffix(".safetensors"), program, device)

    (executor, weights), load_seconds = timed(load)
    spec = program.input_specs[0]

    def run() -> NDArray[Any]:
        outputs = executor.run(inputs={spec.name: NPUBuffer.from_numpy(image, device, spec=spec)}, weights=weights)
        return outputs[program.output_specs[0].name].to_numpy(spec=program.output_specs[0])

    logits, run_seconds = median_time(run, _RUNS)
    return _Outcome(program, folder, device, logits[0], extract, compile_, load_seconds, run_seconds)


def _show(
    console: Console, path: Path, sample: SampleModel, expected: NDArray[Any], eager_seconds: float, outcome: _Outcome
) -> bool:
    """Prints the comparison; whether the five best classes are the same."""
    wanted, given = _top5(expected), _top5(outcome.logits)
    classes = Table(title=f"{outcome.program.model} on {path.name}: the five best classes")
    for heading in ("", "PyTorch, float32 on the CPU", f"{outcome.device.name}, {outcome.program.compute_dtype}"):
        classes.add_column(heading)
    for rank in range(5):
        sides = (_named(sample, int(wanted[rank]), expected), _named(sample, int(given[rank]), outcome.logits))
        classes.add_row(str(rank + 1), *sides)
    figures = Table(show_header=False)
    correlation = np.corrcoef(expected, outcome.logits.astype(np.float64))[0, 1]
    rows = {
        "weights": sample.weights,
        "device": outcome.device.backend.name,
        "Pearson r against PyTorch": f"{correlation:.7f}",
        "kernels launched": str(len(outcome.program.main.calls)),
        "extract": f"{outcome.extract:.2f} s",
        "compile": f"{outcome.compile * 1000:.0f} ms",
        "load (kernels and weights)": f"{outcome.load:.2f} s",
        f"run, median of {_RUNS}": f"{outcome.run * 1000:.1f} ms",
        f"PyTorch eager, median of {_RUNS}": f"{eager_seconds * 1000:.1f} ms",
        "files": f"{outcome.folder}/{outcome.program.model}.json, .safetensors, .npubin",
    }
    for name, value in rows.items():
        figures.add_row(name, value)
    console.print(classes, figures)
    same = bool((wanted == given).all())
    console.print("[green]the same five classes[/green]" if same else "[red]the five best classes differ[/red]")
    return same


def _top5(logits: NDArray[Any]) -> NDArray[np.intp]:
    return np.argsort(-logits.astype(np.float64), kind="stable")[:5]


def _named(sample: SampleModel, index: int, logits: NDArray[Any]) -> str:
    shifted = np.exp(logits.astype(np.float64) - float(logits.max()))
    name = sample.classes[index] if sample.classes else f"class {index}"
    return f"{name}  {shifted[index] / shifted.sum():.1%}"
