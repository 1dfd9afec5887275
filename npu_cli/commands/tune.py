"""`npu tune`: times what the compiler left to choose, on this machine's GPU, and keeps the winners."""

from __future__ import annotations

import argparse
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from npu_cli.progress import PREPARING, waiting
from npu_cli.tuning_device import open_tuning_device
from npu_compiler.artifact.generation_spec import FILE_NAME, GenerationSpec
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from npu_runtime.tuning import Tuning
from npu_runtime.weight_loader import Weights

__all__ = ["execute"]

_PATTERN = 1 << 16  # elements that plausible values repeat after


def execute(args: argparse.Namespace) -> int:
    program = CompiledProgram.load(args.program)
    device = open_tuning_device(program, args.device)
    with waiting(PREPARING):
        executors = {name: Executor(program, device, name) for name in program.functions}
    weights = load_weights(args.weights, program, device) if args.weights else _plausible_weights(program, device)
    positions = _positions(args.program.parent)
    for name, executor in executors.items():
        arrays = {spec.name: _plausible(spec) for spec in executor.plan.inputs} | positions.get(name, {})
        inputs = {
            spec.name: NPUBuffer.from_numpy(arrays[spec.name], device, spec=spec) for spec in executor.plan.inputs
        }
        with waiting(f"timing the choices of {name}"):
            tuning = executor.tune(inputs, weights)
        Console(markup=False, emoji=False).print(_table(name, tuning))
    return 0


def _plausible(spec: BufferSpec, scale: float = 1.0) -> NDArray[Any]:
    """Numbers about `scale`; zeros for integers, which may be indices of anything."""
    if not spec.dtype.is_float:
        return np.zeros(spec.shape, spec.host_dtype.numpy)
    pattern = scale * np.random.default_rng(0).standard_normal(_PATTERN, np.float32)
    return np.resize(pattern.astype(spec.dtype.numpy), spec.shape)


def _plausible_weights(program: CompiledProgram, device: Device) -> Weights:
    """Weights for a program whose file is not given; constants are as they are."""
    buffers = {}
    for recipe in program.recipes:
        if recipe.inputs:
            array = _plausible(recipe.spec, 1 / sqrt(max(1, prod(recipe.spec.shape[1:]))))  # sums stay about one
        else:
            array = recipe.compute([])
        buffers[recipe.spec.name] = device.backend.upload(array, recipe.spec)
    return Weights(device.backend, buffers)


def _positions(folder: Path) -> dict[str, dict[str, NDArray[Any]]]:
    """For a language model's functions, the positions of tokens in the middle of the cache."""
    if not (folder / FILE_NAME).exists():
        return {}
    spec = GenerationSpec.load(folder)
    starts = {name: (spec.cache_length - step.length) // 2 for name, step in spec.functions.items()}
    return {
        name: {step.positions: np.arange(starts[name], starts[name] + step.length)}
        for name, step in spec.functions.items()
    }


def _table(function: str, tuning: Tuning) -> Table:
    if not tuning.choices:
        return Table(title=f"{function}: nothing to choose on this device", title_justify="left")
    table = Table(title=_title(function, tuning), title_justify="left")
    for heading in ("choice", "times", "option", "microseconds", ""):
        table.add_column(heading, justify="right" if heading in ("times", "microseconds") else "left")
    for tuned in tuning.choices:
        for index, (option, time) in enumerate(zip(tuned.options, tuned.times.microseconds, strict=True)):
            first = (tuned.label, str(tuned.count)) if index == 0 else ("", "")
            shown = "cannot run" if time is None else f"{time:.1f}"
            table.add_row(*first, option, shown, "taken" if index == tuned.times.winner else "")
        table.add_section()
    return table


def _title(function: str, tuning: Tuning) -> str:
    return f"{function}: {tuning.before * 1e3:.3f} ms with the preferred options, {tuning.after * 1e3:.3f} ms tuned"
