"""Weights that a recipe only puts in their place: read from the file part by part, straight into the device's memory.

No array of a whole tensor is made, and what is looked at for NaN is still in the cache from being read. Where the file
has another floating-point type, a step at a time is converted on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import local
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npu_compiler.artifact.recipes import Run, WeightInput, WeightRecipe
from npu_compiler.dtypes import DType, converts, dtype
from npu_compiler.errors import InputError
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.safetensors_file import TensorFile
from npu_runtime.weight_values import STEP_BYTES, all_finite

__all__ = ["WeightPart", "parts_of"]

Array = NDArray[Any]


class _Read(NamedTuple):
    """Elements of a tensor of the file, from `start` on, and where they lie in a part; `dtype` is the file's."""

    name: str
    dtype: DType
    start: int
    place: Run


class WeightPart(NamedTuple):
    """A part of a weight.

    Attributes:
        spec: The weight, dense.
        start: The part's first element.
        size: How many it has.
        reads: What it is made of.
    """

    spec: BufferSpec
    start: int
    size: int
    reads: tuple[_Read, ...]

    def fill(self, memory: NDArray[np.uint8], source: TensorFile) -> bool:
        """Reads it into `memory`; whether all its values are finite, there and in the file. If not, it is not filled.

        Raises:
            WeightError: The file cannot be read, or was changed.
        """
        flat = memory.view(self.spec.dtype.numpy)
        return all(self._fill(read, read.place.of(flat), source) for read in self.reads)

    def _fill(self, read: _Read, place: Array, source: TensorFile) -> bool:
        """Fills `place` [rows, elements of one], several rows at once."""
        dense = place.flags.c_contiguous
        if dense:
            place = place.reshape(-1, 1)
        rows, length = place.shape
        width = length * read.dtype.size
        step = max(1, STEP_BYTES // width)
        for row in range(0, rows, step):
            target = place[row : row + step]
            straight = dense and read.dtype == self.spec.dtype
            values = target if straight else _scratch.of(target.size, read.dtype).reshape(target.shape)
            memory = values.reshape(-1).view(np.uint8)
            source.read_into(read.name, memory, read.start * read.dtype.size + row * width)
            if not all_finite(values):
                return False
            if not straight:
                try:
                    self.spec.store(values, target)
                except InputError:  # too large for the device's type
                    return False
        return True


def parts_of(recipe: WeightRecipe, source: TensorFile, most: int) -> list[WeightPart] | None:
    """The parts of a weight, of at most `most` bytes each; None where it is not made of parts.

    It is where its recipe only puts tensors in their place, and they need no more than another floating-point type.

    Raises:
        WeightError: The file says what cannot be of a tensor.
    """
    spec, runs = recipe.spec, recipe.runs
    if runs is None or not spec.layout.is_row_major or not spec.nbytes:
        return None
    kinds = [_kind(item, source, spec.dtype) for item in recipe.inputs]
    size, stride, count = spec.layout.size, runs[0].stride, most // spec.dtype.size
    whole = [_Read(item.name, kind, 0, run) for item, kind, run in zip(recipe.inputs, kinds, runs, strict=True) if kind]
    if len(whole) < len(runs):
        return None
    if stride == size and count:
        return [WeightPart(spec, start, n, tuple(_within(whole, start, n))) for start, n in _ranges(size, count)]
    if stride > count:
        return None
    rows = _ranges(size // stride, count // stride)
    return [
        WeightPart(spec, row * stride, n * stride, tuple(r._replace(start=row * r.place.length) for r in whole))
        for row, n in rows
    ]


def _kind(item: WeightInput, source: TensorFile, wanted: DType) -> DType | None:
    """The data type of a tensor in the file, if it has the shape and the kind of type that it should have."""
    kind, shape = source.describe(item.name)
    alike = converts(kind, wanted) and converts(kind, dtype(item.dtype))
    return kind if shape == item.shape and (alike or (kind == wanted and kind.name == item.dtype)) else None


def _within(whole: list[_Read], start: int, size: int) -> Iterator[_Read]:
    """What lies in `size` elements from `start` on, of tensors one after another."""
    for read in whole:
        offset, length, _ = read.place
        first, last = max(start, offset), min(start + size, offset + length)
        if first < last:
            yield read._replace(start=first - offset, place=Run(first - start, last - first, size))


def _ranges(size: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(step, size - start)) for start in range(0, size, step))


class _Scratch(local):
    """Memory of each thread, the same from one step to the next."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, size: int, kind: DType) -> Array:
        nbytes = size * kind.size
        if nbytes > self._memory.size:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(kind.numpy)


_scratch = _Scratch()
