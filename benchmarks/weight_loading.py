"""How fast weights go from a file in the page cache to a device, by what must be done to them on the way.

Run it as ``python -m benchmarks.weight_loading``, on any device. Each row loads a file of random weights in layers of
several sizes, as those of a language model or of a convolutional network; a GB is one of the file. "as arrays" hides
from the loader that they are in a file: each tensor is an array of its own before it crosses. Memory for the weights is
new each time. The rows take turns, and the best of each counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import npu_compiler
from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.dtypes import FLOAT16, DType, dtype
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime import Device, load_weights
from npu_runtime.safetensors_file import SafetensorsFile
from npu_runtime.weight_values import all_finite

_STEPS = (1, 2, 4, 8)  # MiB
_THREADS = 8
_WIDTH, _HIDDEN, _GROUP = 1536, 8960, 256  # of a decoder's layer
_VOCABULARY = 1 / 6  # of all bytes
_CHANNELS = (64, 256, 512)


class _Arrays(Mapping[str, NDArray[Any]]):
    """A file of which only arrays can be asked."""

    def __init__(self, file: SafetensorsFile) -> None:
        self._file = file

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._file[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weight_loading", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", help="default: the best of this machine")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each file (default: 1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the files, which are removed again (default: a temporary one)")
    args = parser.parse_args()
    device = Device(args.device) if args.device else Device()
    print(f"{device.name}, {os.cpu_count()} cores, {args.gigabytes:g} GB")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = _rows(device, Path(folder), int(args.gigabytes * 1e9))
        times = [{name: _times(load) for name, load in rows.items()} for _ in range(args.rounds)]
    for name in rows:
        seconds, processor = (min(measured) for measured in zip(*(one[name] for one in times), strict=True))
        print(f"{name:<58}{1 / seconds:7.2f} GB/s {1e3 * processor:7.0f} ms of the processor for a GB")


def _times(load: Callable[[], int]) -> tuple[float, float]:
    """Seconds for a GB of what `load` gives the bytes of: on the clock, and of all threads on the processor."""
    started, used = perf_counter(), process_time()
    gigabytes = load() / 1e9
    return (perf_counter() - started) / gigabytes, (process_time() - used) / gigabytes


def _rows(device: Device, folder: Path, nbytes: int) -> dict[str, Callable[[], int]]:
    """What is measured, by its name; each gives the bytes that it took from a file."""
    program = _small_program(device)
    decoder = _decoder(nbytes, dtype("bfloat16"))
    plain = tuple(_identity(item) for recipe in decoder for item in recipe.inputs)
    half, wide = folder / "bfloat16.safetensors", folder / "float32.safetensors"
    network = _network(nbytes)
    _save(decoder, half)
    _save(network, wide)
    cast = tuple(_identity(item, FLOAT16) for recipe in network for item in recipe.inputs)

    def load(path: Path, recipes: tuple[WeightRecipe, ...], as_arrays: bool = False) -> Callable[[], int]:
        return lambda: _loaded(path, replace(program, recipes=recipes), device, as_arrays)

    return {
        "reading alone, one thread": lambda: _read(half, 1, _STEPS[0] << 20, looking=False),
        **{
            f"reading alone, {_THREADS} threads, steps of {step} MiB": partial(_read, half, _THREADS, step << 20, False)
            for step in _STEPS
        },
        **{
            f"reading and looking, {_THREADS} threads, steps of {step} MiB": partial(
                _read, half, _THREADS, step << 20, True
            )
            for step in _STEPS
        },
        "bfloat16 as it is, as arrays": load(half, plain, True),
        "bfloat16 as it is": load(half, plain),
        "bfloat16, linears merged, as arrays": load(half, decoder, True),
        "bfloat16, linears merged": load(half, decoder),
        "float32 to float16, as arrays": load(wide, cast, True),
        "float32 to float16": load(wide, cast),
        "float32, BatchNorm folded, to float16": load(wide, network),
    }


def _loaded(path: Path, program: CompiledProgram, device: Device, as_arrays: bool) -> int:
    weights = load_weights(_Arrays(SafetensorsFile(path)) if as_arrays else path, program, device)
    min(weights.values(), key=lambda buffer: buffer.nbytes).reading()  # behind all that was asked of the device
    return path.stat().st_size


def _read(path: Path, threads: int, step: int, looking: bool) -> int:
    """Reads all bytes of a file, in steps, each thread into the same memory again; looks for NaN there if asked to."""
    file, numbers = SafetensorsFile(path), count()
    places = [
        (name, at, min(step, size - at))
        for name in file
        for size in [prod(file.describe(name)[1]) * file.describe(name)[0].size]
        for at in range(0, size, step)
    ]

    def run(_: int) -> None:
        memory = np.empty(step, np.uint8)
        while (number := next(numbers)) < len(places):
            name, at, nbytes = places[number]
            file.read_into(name, memory[:nbytes], at)
            if looking and not all_finite(memory[:nbytes].view(file.describe(name)[0].numpy)):
                raise SystemExit(f"'{name}' is not finite")

    with ThreadPoolExecutor(threads) as workers:
        list(workers.map(run, range(threads)))
    return path.stat().st_size


def _small_program(device: Device) -> CompiledProgram:
    """Any program for the device; only its recipes matter here."""
    extraction = npu_compiler.extract(torch.nn.ReLU().eval(), (torch.zeros(1, 64),))
    program: CompiledProgram = npu_compiler.compile(extraction.ir, target=device.target)
    return program


def _identity(item: WeightInput, kind: DType | None = None) -> WeightRecipe:
    given = dtype(item.dtype)
    return WeightRecipe(BufferSpec(item.name, kind or given, given, dense(item.shape)), (item,))


def _merged(name: str, items: list[WeightInput], transform: str) -> WeightRecipe:
    shape, kind = (sum(item.shape[0] for item in items), *items[0].shape[1:]), dtype(items[0].dtype)
    return WeightRecipe(BufferSpec(name, kind, kind, dense(shape)), tuple(items), transform)


def _decoder(nbytes: int, kind: DType) -> tuple[WeightRecipe, ...]:
    """Weights of a language model, in layers as those of Qwen2.5-1.5B, with linears of one input merged."""

    def item(name: str, *shape: int) -> WeightInput:
        return WeightInput(name, shape, kind.name)

    rows = int(nbytes * _VOCABULARY) // (_WIDTH * kind.size)
    recipes = [_identity(item("embedding", rows, _WIDTH))]
    while sum(recipe.spec.nbytes for recipe in recipes) < nbytes:
        layer = f"layers.{len(recipes)}"
        queries = [
            item(f"{layer}.{name}", rows, _WIDTH) for name, rows in zip("qkv", (_WIDTH, _GROUP, _GROUP), strict=True)
        ]
        gates = [item(f"{layer}.{name}", _HIDDEN, _WIDTH) for name in ("gate", "up")]
        recipes += [
            _identity(item(f"{layer}.norm", _WIDTH)),
            _merged(f"{layer}.qkv", queries, "concatenate"),
            _identity(item(f"{layer}.o", _WIDTH, _WIDTH)),
            _merged(f"{layer}.gate_up", gates, "interleave"),
            _identity(item(f"{layer}.down", _WIDTH, _HIDDEN)),
        ]
    return tuple(recipes)


def _network(nbytes: int) -> tuple[WeightRecipe, ...]:
    """Float32 weights of convolutions, each with the BatchNorm after it."""
    recipes: list[WeightRecipe] = []
    made = 0
    while made < nbytes:
        channels = _CHANNELS[len(recipes) % len(_CHANNELS)]
        name, shape = f"conv.{len(recipes)}", (channels, channels, 3, 3)
        items = WeightInput(name, shape, "float32"), WeightInput(f"{name}.variance", (channels,), "float32")
        spec = BufferSpec(f"{name} folded", FLOAT16, FLOAT16, dense(shape))
        recipes.append(WeightRecipe(spec, items, "fold_weight", (("eps", 1e-5),)))
        made += 4 * prod(shape)
    return tuple(recipes)


def _save(recipes: tuple[WeightRecipe, ...], path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    save_file(
        {
            item.name: (torch.rand(item.shape, generator=generator) + 0.5).to(getattr(torch, item.dtype))
            for recipe in recipes
            for item in recipe.inputs
        },
        path,
    )


if __name__ == "__main__":
    main()
