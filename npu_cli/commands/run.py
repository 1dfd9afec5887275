"""`npu run`: a program, or IR, on images or arrays."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_cli.arrays import read_arrays, write_array
from npu_cli.models import open_model
from npu_compiler.artifact.output_file import check_output
from npu_compiler.errors import InputError
from npu_compiler.partitioning.ledger import price_text

__all__ = ["execute"]


def execute(args: argparse.Namespace) -> int:
    if args.ledger and not args.partition:
        raise InputError("given --ledger without --partition, which divides the model; add it")
    model = open_model(args.model, args.device, partition=args.partition, tune=args.tune)
    files = _input_files(args.input, [spec.name for spec in model.inputs])
    outputs = {} if args.output is None else _output_files(args.output, model.outputs)
    if args.output is not None:
        _make_folder(args.output)
    for path in outputs.values():
        check_output(path, [args.model, *files.values(), *([args.weights] if args.weights else [])])
    arrays = read_arrays(files, model.inputs)
    for name, array in model.run(arrays, args.weights).items():
        print(f"{name}: {array.dtype} {list(array.shape)} on {model.device.backend.name}")
        _print_highest(array, args.top)
        if name in outputs:
            write_array(outputs[name], array)
            print(f"  written to {outputs[name]}")
    if args.ledger and model.measured is not None:
        print("\n".join(price_text(model.measured(arrays).ledger)) or "all of it runs on the device")
    return 0


def _input_files(given: list[str], names: list[str]) -> dict[str, Path]:
    """The file of each input."""
    files: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or name not in names:
            raise InputError(f"given --input {text}, expected NAME=FILE with NAME one of {', '.join(names)}")
        if name in files:
            raise InputError(f"given --input {name}=... twice, '{files[name]}' and '{path}'; expected it once")
        files[name] = Path(path)
    missing = [name for name in names if name not in files]
    if missing:
        raise InputError(f"input '{missing[0]}' is missing; add --input {missing[0]}=FILE, an image or an .npy file")
    return files


def _output_files(folder: Path, names: tuple[str, ...]) -> Mapping[str, Path]:
    """The file of each output; names come from a file that may be a stranger's, and must not lead elsewhere."""
    for name in names:
        if Path(name).name != name:
            raise InputError(f"the output '{name}' has a name that is no file's; leave --output out")
    return {name: folder / f"{name}.npy" for name in names}


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"given --output '{folder}', which is no folder; choose another") from error
    except OSError as error:
        raise InputError(f"cannot write to '{folder}': {error.strerror}; choose another with --output") from error


def _print_highest(array: NDArray[Any], count: int) -> None:
    """Prints the highest values of the last dimension, where the tensor is one row."""
    if array.ndim == 0 or array.size != array.shape[-1]:
        return
    row = array.reshape(-1).astype(np.float64)
    for index in np.argsort(-row, kind="stable")[:count]:
        print(f"  {index:>6}  {row[index]:.6g}")
