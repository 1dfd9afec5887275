"""How a tensor lies in memory: the order of its dimensions and the padding of its channels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import DType
from npu_compiler.errors import InputError
from npu_compiler.tensor.view import View

__all__ = ["TOO_LARGE_REMEDY", "BufferSpec", "Layout", "channels_last", "dense", "filter_order", "layout_of"]

_KEPT = 4096  # layouts: shapes repeat, and a model has few
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TOO_LARGE_REMEDY = (
    "compile the model with dtype='bfloat16', which holds them, scale the values, or give infinity where that is "
    "meant, as in a mask"
)


@dataclass(frozen=True)
class Layout:
    """Places a tensor of logical `shape` in a flat buffer.

    Attributes:
        shape: Logical shape.
        alloc_shape: Shape with padding, in the logical order of dimensions; no dimension is smaller than in `shape`.
        order: The dimensions from outermost to innermost; ``(0, 2, 3, 1)`` is channels-last.
    """

    shape: tuple[int, ...]
    alloc_shape: tuple[int, ...]
    order: tuple[int, ...]

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Distance in elements between neighbours along each logical dimension."""
        strides = [0] * len(self.shape)
        step = 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= self.alloc_shape[dim]
        return tuple(strides)

    @cached_property
    def place(self) -> View:
        """Where each element lies in the buffer."""
        return View(self.shape, self.strides)

    @cached_property
    def size(self) -> int:
        """Elements the buffer holds, padding included."""
        return prod(self.alloc_shape)

    @property
    def is_padded(self) -> bool:
        return self.shape != self.alloc_shape

    @cached_property
    def is_row_major(self) -> bool:
        """Whether the elements lie in the order of the tensor's own, one beside the other."""
        return not self.is_padded and self.strides == dense(self.shape).strides

    def view(self, flat: NDArray[Any]) -> NDArray[Any]:
        """The tensor that a flat array of `size` elements holds, without the padding, as a view of it."""
        if self.is_row_major:
            return flat[: self.size].reshape(self.shape)
        stored = flat[: self.size].reshape([self.alloc_shape[dim] for dim in self.order])
        logical = stored.transpose(sorted(range(len(self.order)), key=self.order.__getitem__))
        window: tuple[Any, ...] = tuple(slice(0, n) for n in self.shape)
        return logical[(*window, ...)]

    def pack(self, array: NDArray[Any]) -> NDArray[Any]:
        """Copies `array` of shape `shape` into a flat array of `size` elements; the padding is zero."""
        flat = np.zeros(self.size, array.dtype)
        self.view(flat)[...] = array
        return flat

    def unpack(self, flat: NDArray[Any]) -> NDArray[Any]:
        """The tensor that a flat array of `size` elements holds, without the padding, as a contiguous copy."""
        return self.view(flat).copy()


@lru_cache(_KEPT)
def dense(shape: tuple[int, ...]) -> Layout:
    """Row-major and without padding."""
    return Layout(shape, shape, tuple(range(len(shape))))


@lru_cache(_KEPT)
def channels_last(shape: tuple[int, ...], channels: int) -> Layout:
    """Images [N, C, ...] with the channels of a pixel side by side, of which there is room for `channels`."""
    return Layout(shape, (shape[0], channels, *shape[2:]), (0, *range(2, len(shape)), 1))


def filter_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of a filter [O, I, ...] by taps, from outermost to innermost, without that of its outputs.

    A tap has its channels side by side, and with each channel its taps along the depth of a volume, which convolutions
    take for channels, unless there are no other taps.
    """
    rank = len(shape)
    return (3, 4, 1, 2) if rank == 5 and shape[3:] != (1, 1) else (*range(2, rank), 1)


def layout_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout | None:
    """The layout without padding whose strides these are, or None; strides of dimensions of size 1 do not matter."""
    order = tuple(sorted(range(len(shape)), key=lambda dim: (shape[dim] != 1, -strides[dim])))
    layout = Layout(shape, shape, order)
    same = all(n == 1 or s == own for n, s, own in zip(shape, strides, layout.strides, strict=True))
    return layout if same else None


@dataclass(frozen=True)
class BufferSpec:
    """A tensor at the border of a program: an input, an output or a weight as the device holds it.

    Attributes:
        name: Name in the IR.
        dtype: Data type in device memory.
        host_dtype: Data type the model declares; what `decode` gives and `encode` expects.
        layout: Place of the elements in the buffer.
    """

    name: str
    dtype: DType
    host_dtype: DType
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def alloc_shape(self) -> tuple[int, ...]:
        return self.layout.alloc_shape

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, padding included."""
        return self.layout.size * self.dtype.size

    def places_as(self, other: BufferSpec) -> bool:
        """Whether each element lies where `other` expects it, in the data type that it expects."""
        if self is other:
            return True
        if (self.dtype, self.shape, self.nbytes) != (other.dtype, other.shape, other.nbytes):
            return False
        # The stride of a dimension of one element places nothing.
        pairs = zip(self.shape, self.layout.strides, other.layout.strides, strict=True)
        return all(extent <= 1 or stride == expected for extent, stride, expected in pairs)

    def encode(self, array: NDArray[Any]) -> NDArray[Any]:
        """Turns a host array into the flat array that the device's buffer holds.

        Args:
            array: Shape `shape`; dtype `host_dtype` or `dtype`, or any floating-point type where this spec is
                floating-point. Infinities and NaN stay what they are.

        Raises:
            InputError: Another shape, a dtype of another category, or a number that `dtype` cannot hold.
        """
        flat = np.zeros(self.layout.size, self.dtype.numpy)
        self._store(array, flat)
        return flat

    def encode_bytes(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        """The bytes of `encode`; those of `array` itself where it lies as the device wants it."""
        self.check(array)
        if self.layout.is_row_major and array.dtype == self.dtype.numpy and array.flags.c_contiguous:
            return array.reshape(-1).view(np.uint8)
        return self.encode(array).view(np.uint8)

    def encode_into(self, array: NDArray[Any], memory: NDArray[np.uint8]) -> None:
        """Does as `encode`, but straight into `memory` of at least `nbytes` bytes: one copy in all."""
        flat = memory[: self.nbytes].view(self.dtype.numpy)
        if self.layout.is_padded:
            flat[:] = 0
        self._store(array, flat)

    def decode(self, flat: NDArray[Any]) -> NDArray[Any]:
        """The inverse of `encode`: a new contiguous array of shape `shape` and dtype `host_dtype`.

        Args:
            flat: What `encode` gave, or the bytes of it.
        """
        stored = flat.view(self.dtype.numpy) if flat.dtype != self.dtype.numpy else flat
        return self.layout.view(stored).astype(self.host_dtype.numpy, order="C")

    def _store(self, array: NDArray[Any], flat: NDArray[Any]) -> None:
        self.check(array)
        self.store(array, self.layout.view(flat))

    def store(self, array: NDArray[Any], place: NDArray[Any]) -> None:
        """Converts some of a tensor's elements to `dtype`, into `place`, which has the shape of `array`.

        Raises:
            InputError: A number that `dtype` cannot hold.
        """
        if array.dtype == place.dtype:
            place[...] = array
            return
        if array.dtype == _BFLOAT16:
            array = array.astype(np.float32)  # numpy notices an overflow only between its own types
        try:
            with np.errstate(over="raise"):
                place[...] = array
        except FloatingPointError:
            raise self.too_large(array) from None

    def too_large(self, array: NDArray[Any]) -> InputError:
        """The error for an array with finite values beyond the largest of `dtype`."""
        finite = np.abs(array[np.isfinite(array)]).max()
        largest = float(ml_dtypes.finfo(self.dtype.numpy).max)  # type: ignore[no-untyped-call]
        return InputError(
            f"'{self.name}': given values up to {finite:.4g} in magnitude, {self.dtype} on the device holds up to "
            f"{largest:.5g}; {TOO_LARGE_REMEDY}"
        )

    def check(self, array: NDArray[Any]) -> None:
        """Raises InputError where `encode` refuses an array."""
        if array.shape != self.shape:
            raise InputError(f"'{self.name}': given an array of shape {tuple(array.shape)}, expected {self.shape}")
        given = array.dtype
        if given == self.dtype.numpy:
            return
        floats = self.dtype.is_float and self.dtype.coding is None and (given.kind == "f" or given == _BFLOAT16)
        if not floats and given not in (self.dtype.numpy, self.host_dtype.numpy):
            raise InputError(
                f"'{self.name}': given an array of dtype {given}, expected {self.host_dtype}; convert it with "
                f"array.astype('{self.host_dtype}') if that keeps its values"
            )
        if self.dtype.is_integer and given.itemsize > self.dtype.size and array.size:
            limits = np.iinfo(self.dtype.name)
            if array.min() < limits.min or array.max() > limits.max:
                raise InputError(
                    f"'{self.name}': given integers from {array.min()} to {array.max()}, expected {limits.min} to "
                    f"{limits.max}, which {self.dtype} on the device holds"
                )
