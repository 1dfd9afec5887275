"""Weights: from a file or from arrays, through the program's recipes, into device memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import BFLOAT16, dtype
from npu_compiler.errors import InputError, IRError, WeightError
from npu_compiler.recipes import WeightInput, WeightRecipe
from npu_runtime.backend import Backend, DeviceBuffer
from npu_runtime.device import Device
from npu_runtime.safetensors_file import SafetensorsFile, ShardedFiles, open_safetensors

__all__ = ["Weights", "check_names", "check_tensor", "load_weights"]

_MAX_LISTED = 8
_MAX_THREADS = 8
_MAX_KEPT_BYTES = 128 << 20  # of a mapped file, before its memory is given back

Array = NDArray[Any]
Source = Mapping[str, Array]


class Weights(Mapping[str, DeviceBuffer]):
    """A program's weights on a device, by the name that the program gives them.

    Attributes:
        backend: The device that holds them.
        nbytes: Device memory they take.
    """

    def __init__(self, backend: Backend, buffers: Mapping[str, DeviceBuffer]) -> None:
        self.backend, self._buffers = backend, dict(buffers)
        self.nbytes = sum(buffer.nbytes for buffer in self._buffers.values())

    def __getitem__(self, name: str) -> DeviceBuffer:
        return self._buffers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def __repr__(self) -> str:
        return f"Weights({len(self)} tensors, {self.nbytes} bytes on {self.backend.name})"


def load_weights(path: str | os.PathLike[str] | Source, program: CompiledProgram, device: Device) -> Weights:
    """Loads the weights of a program, once for all its functions.

    A file is mapped, not read: beside the device's memory, a few tensors at a time are held, one for each thread that
    loads them. On a terminal a progress bar is shown.

    Args:
        path: A ``.safetensors`` file, a folder with one or with shards and their index, or numpy arrays by name.
        program: The program to run; its recipes say what to make of the tensors.
        device: Where to put them.

    Raises:
        WeightError: The file is damaged, or a tensor is missing, or has another shape or dtype than the program was
            compiled for. Floating-point types are converted to one another.
        OutOfMemoryError: The device has not that much memory.
    """
    source = path if isinstance(path, Mapping) else open_safetensors(Path(path))
    check_names({item.name for recipe in program.recipes for item in recipe.inputs}, source)
    backend, names = device.backend, [recipe.spec.name for recipe in program.recipes]
    buffers = dict(zip(names, backend.allocate_all([recipe.spec.nbytes for recipe in program.recipes]), strict=True))
    _fill(buffers, program.recipes, source, backend)
    return Weights(backend, buffers)


def _fill(
    buffers: Mapping[str, DeviceBuffer], recipes: tuple[WeightRecipe, ...], source: Source, backend: Backend
) -> None:
    """Makes all weights, several at once, and gives back what was read of a file now and then."""
    kept = 0
    workers = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        made = workers.map(lambda recipe: _make(recipe, source, backend, buffers[recipe.spec.name]), recipes)
        with _progress(recipes) as advancing:
            for recipe, seconds in zip(advancing, made, strict=True):
                backend.transfers.uploads.add(recipe.spec.nbytes, seconds)
                kept += recipe.spec.nbytes
                if kept >= _MAX_KEPT_BYTES and isinstance(source, SafetensorsFile | ShardedFiles):
                    source.release()
                    kept = 0
    finally:
        workers.shutdown(cancel_futures=True)


def check_names(needed: Set[str], source: Source) -> None:
    """Checks that `source` has all tensors that are needed.

    Raises:
        WeightError: Some are missing; the message has the names that come near.
    """
    missing = sorted(needed - set(source))
    if not missing:
        return
    lines = [_missing_line(name, source) for name in missing[:_MAX_LISTED]]
    if len(missing) > _MAX_LISTED:
        lines.append(f"and {len(missing) - _MAX_LISTED} more")
    raise WeightError(
        f"given {len(source)} tensors, expected {len(needed)}; {len(missing)} are missing:\n  "
        + "\n  ".join(lines)
        + "\nGive the weights that belong to the IR the program was compiled from"
    )


def _missing_line(name: str, source: Source) -> str:
    near = get_close_matches(name, list(source), n=3)
    return f"'{name}'" + (f", near matches: {', '.join(near)}" if near else "")


def _make(recipe: WeightRecipe, source: Source, backend: Backend, buffer: DeviceBuffer) -> float:
    """Fills the buffer of a weight, and gives the seconds that it took."""
    started = perf_counter()
    arrays = [check_tensor(item, source[item.name]) for item in recipe.inputs]
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            tensor = recipe.compute(arrays)
            if tensor.dtype == BFLOAT16.numpy != recipe.spec.dtype.numpy:
                tensor = tensor.astype(np.float32)  # numpy notices an overflow only between its own types
            backend.write(tensor, recipe.spec, buffer)
    except (FloatingPointError, WeightError) as error:
        sources = ", ".join(f"'{item.name}'" for item in recipe.inputs)
        remedy = (
            f"; values too large for {recipe.spec.dtype} need a model compiled with dtype='bfloat16'"
            if "overflow" in str(error)
            else ""
        )
        raise WeightError(f"'{recipe.spec.name}', made of {sources}: {error}{remedy}") from error
    except InputError as error:
        raise WeightError(str(error)) from error
    return perf_counter() - started


def check_tensor(expected: WeightInput, given: object) -> Array:
    """`given` itself, if it is the tensor that is expected, in any floating-point type where it is floating-point.

    Raises:
        WeightError: It is no array, or has another shape or dtype.
    """
    if not isinstance(given, np.ndarray):
        kind = type(given).__name__
        raise WeightError(f"'{expected.name}': given a {kind}, expected a numpy array; tensor.numpy() makes one")
    if given.shape != expected.shape:
        raise WeightError(
            f"'{expected.name}': given shape {given.shape}, expected {expected.shape}; "
            "give the weights that belong to the IR the program was compiled from"
        )
    if given.dtype.name == expected.dtype:
        return given
    try:
        kinds = dtype(given.dtype), dtype(expected.dtype)
    except IRError as error:
        raise WeightError(f"'{expected.name}': {error}") from error
    if kinds[0] != kinds[1] and not (kinds[0].is_float and kinds[1].is_float):
        raise WeightError(f"'{expected.name}': given dtype {kinds[0]}, expected {kinds[1]}")
    return given


@contextmanager
def _progress(recipes: tuple[WeightRecipe, ...]) -> Iterator[Iterable[WeightRecipe]]:
    """The recipes, with a bar on standard error that moves by their bytes; on a terminal only."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading weights", total=sum(recipe.spec.nbytes for recipe in recipes))

        def advance() -> Iterator[WeightRecipe]:
            for recipe in recipes:
                yield recipe
                bar.advance(task, recipe.spec.nbytes)

        yield advance()
