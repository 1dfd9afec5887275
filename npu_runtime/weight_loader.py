"""Weights: from a file or from arrays, through the program's recipes, into device memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import converts, dtype
from npu_compiler.errors import InputError, IRError, WeightError
from npu_runtime.backend import Backend, DeviceBuffer
from npu_runtime.device import Device
from npu_runtime.host_tensors import as_array
from npu_runtime.safetensors_file import TensorFile, open_safetensors
from npu_runtime.weight_parts import WeightPart, parts_of
from npu_runtime.weight_values import check_values

__all__ = ["Source", "Weights", "check_names", "check_tensor", "load_weights", "open_weights"]

_MAX_LISTED = 8
_MAX_THREADS = 8
_TERMINAL_BY_WISH = ("FORCE_COLOR", "TTY_COMPATIBLE")  # what `rich` asks before it asks the stream

Array = NDArray[Any]
Source = Mapping[str, Any]  # of arrays, as `as_array` takes them


class Weights(Mapping[str, DeviceBuffer]):
    """A program's weights on a device, by the name that the program gives them.

    Attributes:
        backend: The device that holds them.
        nbytes: Device memory they take.
        notes: Which tensors of the source have infinite values, and how many; masks do.
    """

    def __init__(self, backend: Backend, buffers: Mapping[str, DeviceBuffer], notes: Iterable[str] = ()) -> None:
        self.backend, self._buffers, self.notes = backend, dict(buffers), tuple(notes)
        self.nbytes = sum(buffer.nbytes for buffer in self._buffers.values())

    def __getitem__(self, name: str) -> DeviceBuffer:
        return self._buffers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def __repr__(self) -> str:
        return f"Weights({len(self)} tensors, {self.nbytes} bytes on {self.backend.name})"


def load_weights(
    path: str | os.PathLike[str] | Source,
    program: CompiledProgram,
    device: Device | Backend | str | None = None,
) -> Weights:
    """Loads the weights of a program, once for all its functions.

    A few threads load them. What a file holds as the device wants it is read straight into the device's memory, or into
    a few pieces of pinned memory on the way there; of what must be computed or converted, each thread holds one tensor
    beside the device's memory. On a terminal a progress bar is shown.

    Args:
        path: A ``.safetensors`` file, a folder with one or with shards and their index, or arrays by name: of numpy, or
            a module's ``state_dict()``.
        program: The program to run; its recipes say what to make of the tensors.
        device: Where to put them, by name or as a backend too; when omitted the best device of the machine that runs
            programs of this target.

    Raises:
        WeightError: The file is damaged, or a tensor is missing, has another shape or dtype than the program was
            compiled for, or holds NaN. Floating-point types are converted to one another.
        InputError: The program or the device is something else.
        DeviceError: There is no such device.
        OutOfMemoryError: The device has not that much memory.
    """
    source = open_weights(path)
    if not isinstance(program, CompiledProgram):
        raise InputError(
            f"given a {type(program).__name__} as program, expected a CompiledProgram: load_weights(file, "
            "program, device)"
        )
    check_names({item.name for recipe in program.recipes for item in recipe.inputs}, source)
    backend, names = Device.of(device, program.target).backend, [recipe.spec.name for recipe in program.recipes]
    buffers = dict(zip(names, backend.allocate_all([recipe.spec.nbytes for recipe in program.recipes]), strict=True))
    return Weights(backend, buffers, _fill(buffers, program.recipes, source, backend))


def open_weights(weights: object) -> Source:
    """The tensors that a caller names by a path or gives by name.

    Raises:
        WeightError: It is neither, or the file is damaged.
    """
    if isinstance(weights, Mapping):
        return weights
    if isinstance(weights, str | os.PathLike) and os.fspath(weights):
        return open_safetensors(Path(weights))
    given = "an empty path" if isinstance(weights, str) else f"a {type(weights).__name__}"
    raise WeightError(
        f"given {given} as weights, expected the path of a .safetensors file, a folder with one, or arrays by name "
        "such as model.state_dict()"
    )


def _fill(
    buffers: Mapping[str, DeviceBuffer], recipes: tuple[WeightRecipe, ...], source: Source, backend: Backend
) -> list[str]:
    """Makes all weights, several at once; gives the notes on what they are made of."""
    notes: dict[str, None] = {}
    workers = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        asked = [_ask(recipe, source, backend, buffers[recipe.spec.name], workers) for recipe in recipes]
        with _progress(recipes) as advancing:
            for recipe, finish in zip(advancing, asked, strict=True):
                seconds, noted = finish()
                backend.transfers.uploads.add(recipe.spec.nbytes, seconds)
                notes.update(dict.fromkeys(noted))
    finally:
        workers.shutdown(cancel_futures=True)
    return list(notes)


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


def _ask(
    recipe: WeightRecipe, source: Source, backend: Backend, buffer: DeviceBuffer, workers: ThreadPoolExecutor
) -> Callable[[], tuple[float, list[str]]]:
    """Asks `workers` for a weight, as a whole or in parts; what waits for it then gives what `_make` does."""
    if not isinstance(source, TensorFile) or (parts := parts_of(recipe, source, buffer.part_bytes)) is None:
        return workers.submit(_make, recipe, source, backend, buffer).result
    filled = [workers.submit(_fill_part, part, source, buffer) for part in parts]

    def finish() -> tuple[float, list[str]]:
        results = [part.result() for part in filled]
        if all(finite for _, finite in results):
            return sum(seconds for seconds, _ in results), []
        return _make(recipe, source, backend, buffer)  # it tells which values are not, and where

    return finish


def _fill_part(part: WeightPart, source: TensorFile, buffer: DeviceBuffer) -> tuple[float, bool]:
    """Fills a part of a weight's buffer; gives the seconds that it took, and whether all values are finite."""
    started = perf_counter()
    with buffer.writing_part(part.start * part.spec.dtype.size, part.size * part.spec.dtype.size) as memory:
        finite = part.fill(memory, source)
    return perf_counter() - started, finite


def _make(recipe: WeightRecipe, source: Source, backend: Backend, buffer: DeviceBuffer) -> tuple[float, list[str]]:
    """Fills the buffer of a weight; gives the seconds that it took, and the notes on what it is made of."""
    started = perf_counter()
    arrays = [check_tensor(item, source[item.name]) for item in recipe.inputs]
    noted = [check_values(item.name, array) for item, array in zip(recipe.inputs, arrays, strict=True)]
    sources = ", ".join(f"'{item.name}'" for item in recipe.inputs)
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            backend.write(recipe.compute(arrays), recipe.spec, buffer)
    except (FloatingPointError, WeightError) as error:
        remedy = (
            f"; values too large for {recipe.spec.dtype} need a model compiled with dtype='bfloat16'"
            if "overflow" in str(error)
            else ""
        )
        raise WeightError(f"'{recipe.spec.name}', made of {sources}: {error}{remedy}") from error
    except InputError as error:
        raise WeightError(f"made of {sources}: {error}") from error
    return perf_counter() - started, [note for note in noted if note]


def check_tensor(expected: WeightInput, given: object) -> Array:
    """`given` as an array, if it is the tensor that is expected, in any floating-point type where it is floating-point.

    Raises:
        WeightError: It is no array, or has another shape or dtype.
    """
    try:
        given = as_array(given, f"'{expected.name}'")
    except InputError as error:
        raise WeightError(str(error)) from error
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
    if kinds[0] != kinds[1] and not converts(*kinds):
        raise WeightError(f"'{expected.name}': given dtype {kinds[0]}, expected {kinds[1]}")
    return given


@contextmanager
def _progress(recipes: tuple[WeightRecipe, ...]) -> Iterator[Iterable[WeightRecipe]]:
    """The recipes, with a bar on standard error that moves by their bytes; on a terminal only."""
    if not (_is_terminal(sys.stderr) or any(name in os.environ for name in _TERMINAL_BY_WISH)):
        yield recipes  # importing `rich` takes as long as reading a few hundred megabytes
        return
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


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False
