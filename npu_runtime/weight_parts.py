"""Weights that a recipe only puts in their place: read from the file part by part, straight into the device's memory.

No array of a whole tensor is made, and what is looked at for NaN is still in the cache from reading it.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import local
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import ALL, DType
from npu_compiler.recipes import Run, WeightRecipe
from npu_runtime.safetensors_file import TensorFile
from npu_runtime.weight_values import all_finite

__all__ = ["WeightPart", "parts_of"]

_STEP_BYTES = 1 << 20  # read and looked at in one step; a few of them are in a core's cache

Bytes = NDArray[np.uint8]


class _Read(NamedTuple):
    """Bytes of a tensor of the file, and where they go: `length` at `offset` in each `stride` bytes of the part."""

    name: str
    start: int
    nbytes: int
    place: Run

    def of(self, memory: Bytes) -> Bytes:
        """Its place in the memory of the part [rows, length]."""
        return self.place.of(memory)


class WeightPart(NamedTuple):
    """A part of a weight.

    Attributes:
        start: Its first byte, of those of the weight.
        nbytes: How many it has.
        dtype: Data type of the weight and of the tensors in it.
    """

    start: int
    nbytes: int
    dtype: DType
    reads: tuple[_Read, ...]

    def fill(self, memory: Bytes, source: TensorFile) -> bool:
        """Reads it into `memory` [nbytes]; whether all its values are finite.

        Raises:
            WeightError: The file cannot be read, or was changed.
        """
        return all([self._fill(read, read.of(memory), source) for read in self.reads])

    def _fill(self, read: _Read, place: Bytes, source: TensorFile) -> bool:
        rows, length = place.shape
        together = place.flags.c_contiguous
        if together:
            place, rows, length = place.reshape(-1, 1), place.size, 1
        step, finite = max(1, _STEP_BYTES // length), True
        for row in range(0, rows, step):
            target = place[row : row + step]
            memory = target.reshape(-1) if together else _scratch.of(target.size)
            source.read_into(read.name, memory, read.start + row * length)
            finite &= all_finite(memory.view(self.dtype.numpy))
            if not together:
                target[...] = memory.reshape(target.shape)
        return finite


def parts_of(recipe: WeightRecipe, source: TensorFile, most: int) -> list[WeightPart] | None:
    """The parts of a weight, of at most `most` bytes each; None where it is not made of parts.

    It is where its recipe only puts tensors in their place, and they are in the file as the device wants them.

    Raises:
        WeightError: The file says what cannot be of a tensor.
    """
    spec, runs = recipe.spec, recipe.runs
    if runs is None or not spec.layout.is_row_major or not spec.nbytes or most < spec.dtype.size:
        return None
    declared = {kind.name for kind in ALL if kind == spec.dtype or (kind.is_float and spec.dtype.is_float)}
    if not all(
        item.dtype in declared and source.describe(item.name) == (spec.dtype, item.shape) for item in recipe.inputs
    ):
        return None
    names = [item.name for item in recipe.inputs]
    placed = list(zip(names, (Run(*(n * spec.dtype.size for n in run)) for run in runs), strict=True))
    stride = placed[0][1].stride
    if stride == spec.nbytes:
        most -= most % spec.dtype.size
        return [
            WeightPart(start, end - start, spec.dtype, tuple(_columns(placed, start, end)))
            for start, end in _ranges(spec.nbytes, most)
        ]
    if stride > most:
        return None
    return [
        WeightPart(
            start,
            end - start,
            spec.dtype,
            tuple(
                _Read(name, start // stride * run.length, (end - start) // stride * run.length, run)
                for name, run in placed
            ),
        )
        for start, end in _ranges(spec.nbytes, most - most % stride)
    ]


def _columns(placed: list[tuple[str, Run]], start: int, end: int) -> Iterator[_Read]:
    """What lies in a range of bytes of tensors one after another."""
    for name, run in placed:
        first, last = max(start, run.offset), min(end, run.offset + run.length)
        if first < last:
            yield _Read(name, first - run.offset, last - first, Run(first - start, last - first, end - start))


def _ranges(nbytes: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, nbytes)) for start in range(0, nbytes, step))


class _Scratch(local):
    """Memory of each thread, which is the same from one step to the next."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, nbytes: int) -> Bytes:
        if nbytes > self._memory.size:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes]


_scratch = _Scratch()
