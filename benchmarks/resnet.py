"""ResNet-18 and ResNet-50: accuracy, launches, and the times of every stage.

Run it as ``python -m benchmarks.resnet``; ``--json`` writes the figures. Kernels are compiled into an empty cache
first, so that one run shows both the first start and the warm times. PyTorch runs beside it, on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import npu_compiler
from npu_cli.sample_models import photograph_crops, resnet
from npu_cli.timing import median_time, timed
from npu_runtime import Device, Executor, NPUBuffer, load_weights

_IMAGES = 10
_CANDIDATES = 32
_CLEAR = 0.005  # of the best score: how far apart the six best classes lie where half precision can tell them apart
_COMPILE_RUNS = 10
_IMPORT_RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resnet", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"], metavar="NAME")
    parser.add_argument("--device", help="the best of this machine when omitted")
    parser.add_argument("--runs", type=int, default=10, help="timed runs on the device and in PyTorch (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="npu-benchmark-") as folder:
        os.environ["NPU_CACHE_DIR"] = folder
        device = Device(args.device)
        figures = {
            "machine": machine_figures(device),
            "import npu_compiler, s": _import_seconds(),
            "models": {name: _measure(name, device, Path(folder), args.runs) for name in args.models},
        }
    _print(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def machine_figures(device: Device) -> dict[str, Any]:
    """What a page says of where its figures were taken."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device.backend.name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _import_seconds() -> float:
    """Seconds that importing the compiler adds to the start of an interpreter."""

    def start(statement: str) -> float:
        command = [sys.executable, "-c", statement]
        return median_time(lambda: subprocess.run(command, check=True), _IMPORT_RUNS)[1]

    return round(start("import npu_compiler") - start("pass"), 3)


def _measure(name: str, device: Device, folder: Path, runs: int) -> dict[str, Any]:
    """All figures of one model; times in seconds."""
    sample = resnet(name, weights="seeded")
    images, ties = _clear_images(sample.module)
    ir = folder / f"{name}.json"
    _, extract = timed(lambda: npu_compiler.extract(sample.module, torch.from_numpy(images[:1]), ir, model_name=name))
    program, compile_ = median_time(lambda: npu_compiler.compile(ir, target=device.target), _COMPILE_RUNS)
    data, pack = median_time(program.to_bytes, _COMPILE_RUNS)
    executor, first_start = timed(lambda: Executor(program, device))
    _, warm_start = timed(lambda: Executor(program, device))
    weights, load = timed(lambda: load_weights(ir.with_suffix(".safetensors"), program, device))
    source, result = program.input_specs[0], program.output_specs[0]

    def run(image: NDArray[np.float32]) -> NDArray[Any]:
        outputs = executor.run({source.name: NPUBuffer.from_numpy(image, device, spec=source)}, weights)
        logits: NDArray[Any] = outputs[result.name].to_numpy(spec=result)[0]
        return logits

    def run_eager(image: NDArray[np.float32]) -> NDArray[Any]:
        with torch.inference_mode():
            logits: NDArray[Any] = sample.module(torch.from_numpy(image))[0].numpy()
        return logits

    pairs = [(run(image[None]), run_eager(image[None])) for image in images]
    _, device_seconds = median_time(lambda: run(images[:1]), runs, warm_up=2)
    _, eager_seconds = median_time(lambda: run_eager(images[:1]), runs, warm_up=2)
    return {
        "weights": sample.weights,
        "compute dtype": program.compute_dtype,
        "lowest Pearson r": min(_correlation(*pair) for pair in pairs),
        "same top-5": sum(_top5(given) == _top5(wanted) for given, wanted in pairs),
        "images": _IMAGES,
        "images left out for ties in PyTorch": ties,
        "dispatches": len(program.main.calls),
        "kernels": len(program.main.kernels),
        "artifact, bytes": len(data),
        "working memory, bytes": program.main.arena_bytes,
        "extract, s": extract,
        "compile IR to bytes, s": compile_ + pack,
        "first start, empty cache, s": first_start,
        "start, warm cache, s": warm_start,
        "load weights, s": load,
        "run one image, s": device_seconds,
        "PyTorch eager float32, s": eager_seconds,
        "ratio to PyTorch eager": device_seconds / eager_seconds,
    }


def _clear_images(module: torch.nn.Module) -> tuple[NDArray[np.float32], int]:
    """Images whose best classes PyTorch itself tells apart, and how many were left out before there were enough.

    Two classes closer than the rounding of half precision come in either order, which says nothing about a compiler.
    """
    images = photograph_crops(_CANDIDATES, seed=1)
    with torch.inference_mode():
        best = torch.cat([module(torch.from_numpy(image[None])).topk(6).values for image in images])
    gaps = (best[:, :-1] - best[:, 1:]).amin(1) / best[:, 0].abs()
    clear = np.flatnonzero((gaps > _CLEAR).numpy())[:_IMAGES]
    return images[clear], int(clear[-1]) + 1 - len(clear)


def _correlation(given: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.corrcoef(given.astype(np.float64), wanted.astype(np.float64))[0, 1])


def _top5(logits: NDArray[Any]) -> list[int]:
    return [int(index) for index in np.argsort(-logits.astype(np.float64), kind="stable")[:5]]


def _print(figures: dict[str, Any]) -> None:
    models = figures["models"]
    table = Table(title=", ".join(f"{key}: {value}" for key, value in figures["machine"].items()))
    table.add_column(f"import npu_compiler: {figures['import npu_compiler, s']} s")
    for name in models:
        table.add_column(name)
    for key in next(iter(models.values())):
        table.add_row(key, *(_text(model[key]) for model in models.values()))
    Console().print(table)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.7f}" if 0.9 < value < 1 else f"{value:.3f}"
    return str(value)


if __name__ == "__main__":
    main()
