"""`npu run`: a program on images or arrays."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_runtime.executor import CUDAExecutor
from npu_cli.images import load_image, preprocess
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError, WeightError
from npu_compiler.layout import BufferSpec
from npu_runtime import Device, Executor, NPUBuffer, load_weights

__all__ = ["execute"]


def execute(args: argparse.Namespace) -> int:
    program = CompiledProgram.load(args.program)
    arrays = _read_inputs(args.input, program.input_specs)
    if args.weights is None and program.recipes:
        raise WeightError(
            f"'{program.model}' has {len(program.recipes)} weights and no file was given; add --weights W.safetensors"
        )
    device = Device(args.device) if args.device else Device.for_target(program.target)
    specs = {spec.name: spec for spec in program.input_specs}
    inputs = {name: NPUBuffer.from_numpy(array, device, spec=specs[name]) for name, array in arrays.items()}
    weights = load_weights(args.weights if args.weights else {}, program, device)
    executor = CUDAExecutor(program, device, tune=True) if args.tune else Executor(program, device)
    outputs = executor.run(inputs, weights)
    for spec in program.output_specs:
        array = outputs[spec.name].to_numpy(spec=spec)
        print(f"{spec.name}: {spec.host_dtype} {list(array.shape)} on {device.backend.name}")
        _print_highest(array, args.top)
        if args.output is not None:
            _save(args.output, spec.name, array)
    return 0


def _read_inputs(given: list[str], specs: tuple[BufferSpec, ...]) -> dict[str, NDArray[Any]]:
    names = {spec.name: spec for spec in specs}
    arrays = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or name not in names:
            raise InputError(f"given --input {text}, expected NAME=FILE with NAME one of {', '.join(names)}")
        arrays[name] = _read_array(Path(path), names[name])
    missing = [name for name in names if name not in arrays]
    if missing:
        raise InputError(f"input '{missing[0]}' is missing; add --input {missing[0]}=FILE, an image or an .npy file")
    return arrays


def _read_array(path: Path, spec: BufferSpec) -> NDArray[Any]:
    if path.suffix == ".npy":
        try:
            array: NDArray[Any] = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"cannot read '{path}' as a numpy array ({error}); np.save makes one") from error
        return array
    if len(spec.shape) != 4 or spec.shape[:2] != (1, 3) or not spec.dtype.is_float:
        raise InputError(
            f"'{spec.name}' has shape {spec.shape} and dtype {spec.host_dtype}, and an image gives float32 of shape "
            f"(1, 3, height, width); give an .npy file instead of '{path}'"
        )
    return preprocess(load_image(path), *spec.shape[2:])


def _print_highest(array: NDArray[Any], count: int) -> None:
    """Prints the highest values of the last dimension, where the tensor is one row."""
    if array.ndim == 0 or array.size != array.shape[-1]:
        return
    row = array.reshape(-1).astype(np.float64)
    for index in np.argsort(-row, kind="stable")[:count]:
        print(f"  {index:>6}  {row[index]:.6g}")


def _save(folder: Path, name: str, array: NDArray[Any]) -> None:
    path = folder / f"{name}.npy"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, array, allow_pickle=False)
    except OSError as error:
        raise InputError(f"cannot write '{path}': {error.strerror}; choose another folder with --output") from error
    print(f"  written to {path}")
