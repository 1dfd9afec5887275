"""The Metal kernels one by one, at the layer shapes of ResNet and at some matrix products: time, GFLOP/s, GB/s.

Run it as ``python -m benchmarks.metal_kernels``; ``--json`` writes the figures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import npu_compiler
from npu_compiler.artifact.plan import KernelCall
from npu_runtime import Device, Executor, NPUBuffer, load_weights

_RUNS = 7

# Images of ResNet: channels, height, outputs, kernel, stride.
_CONVOLUTIONS = {
    "stem": (3, 224, 64, 7, 2),
    "56x56 3x3": (64, 56, 64, 3, 1),
    "28x28 3x3, stride 2": (64, 56, 128, 3, 2),
    "28x28 3x3": (128, 28, 128, 3, 1),
    "14x14 3x3, stride 2": (128, 28, 256, 3, 2),
    "14x14 3x3": (256, 14, 256, 3, 1),
    "7x7 3x3, stride 2": (256, 14, 512, 3, 2),
    "7x7 3x3": (512, 7, 512, 3, 1),
    "28x28 1x1, stride 2": (64, 56, 128, 1, 2),
    "56x56 1x1": (64, 56, 256, 1, 1),
    "14x14 1x1": (1024, 14, 256, 1, 1),
    "7x7 1x1": (512, 7, 2048, 1, 1),
}
# Linear layers: rows, inputs, outputs.
_LINEARS = {
    "linear, 1 row": (1, 512, 1000),
    "linear, 1 row, large": (1, 2048, 4096),
    "linear, 16 rows": (16, 1024, 1024),
    "linear, 512 rows": (512, 512, 512),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metal_kernels", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", help="the best of this machine when omitted")
    parser.add_argument("--only", default="", help="measure the shapes whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    device = Device(args.device)
    cases = {name: case for name, case in _cases().items() if args.only in name}
    figures = {name: _measure(model.half().eval(), x.half(), device) for name, (model, x) in cases.items()}
    _print(figures)
    if args.json is not None:
        args.json.write_text(json.dumps({"device": device.backend.name, "kernels": figures}, indent=2) + "\n")


def _cases() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """A layer and its input by name."""
    cases: dict[str, tuple[nn.Module, torch.Tensor]] = {}
    for name, (channels, size, outputs, kernel, stride) in _CONVOLUTIONS.items():
        layer = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2)
        cases[name] = (nn.Sequential(layer, nn.ReLU()), torch.randn(1, channels, size, size))
    cases["depthwise 3x3"] = (nn.Conv2d(128, 128, 3, 1, 1, groups=128), torch.randn(1, 128, 56, 56))
    cases["max pool"] = (nn.MaxPool2d(3, 2, 1), torch.randn(1, 64, 112, 112))
    for name, (rows, inputs, outputs) in _LINEARS.items():
        cases[name] = (nn.Linear(inputs, outputs), torch.randn(rows, inputs))
    return cases


def _measure(model: nn.Module, x: torch.Tensor, device: Device) -> dict[str, Any]:
    """Median time of the layer's kernels on the device, after one run."""
    extraction = npu_compiler.extract(model, (x,))
    program = npu_compiler.compile(extraction.ir)
    weights = load_weights({name: tensor.numpy() for name, tensor in extraction.weights.items()}, program, device)
    executor = Executor(program, device)
    (spec,) = program.input_specs
    inputs = {spec.name: NPUBuffer.from_numpy(x.numpy(), device, spec)}
    executor.run(inputs, weights)
    seconds = median(sum(executor.run_timed(inputs, weights)[1]) for _ in range(_RUNS))
    steps = executor.plan.steps
    entries = [executor.plan.kernels[step.kernel].entry for step in steps if isinstance(step, KernelCall)]
    return {
        "kernels": entries,
        "ms": seconds * 1e3,
        "GFLOP/s": sum(step.flops for step in steps) / seconds / 1e9,
        "GB/s": sum(step.nbytes for step in steps) / seconds / 1e9,
    }


def _print(figures: dict[str, dict[str, Any]]) -> None:
    table = Table("layer", "kernel", title="Metal kernels", title_justify="left")
    for heading in ("ms", "GFLOP/s", "GB/s"):
        table.add_column(heading, justify="right")
    for name, row in figures.items():
        table.add_row(
            name, ", ".join(row["kernels"]), f"{row['ms']:.3f}", f"{row['GFLOP/s']:.1f}", f"{row['GB/s']:.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
