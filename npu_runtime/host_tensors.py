"""numpy arrays as torch tensors and back, in the same memory wherever both can name it."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["to_numpy", "to_torch"]

# numpy knows these from ml_dtypes, torch has its own; between them the bits travel as integers.
_FOREIGN_TO_NUMPY = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_INTEGERS = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16)}


def to_torch(array: NDArray[Any]) -> torch.Tensor:
    """The array as a tensor. The two share memory, unless the array's strides are none that torch has.

    A read-only array is shared too: whoever computes in place has to work on a copy.
    """
    if array.dtype.name in _FOREIGN_TO_NUMPY:
        bits, _ = _INTEGERS[array.dtype.itemsize]
        kind: torch.dtype = getattr(torch, array.dtype.name)
        return to_torch(array.view(bits)).view(kind)
    if any(stride < 0 or stride % array.itemsize for stride in array.strides) or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array if array.flags.writeable else _writable(array))


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory under another name: torch warns of arrays that it may not write, and never writes these."""
    if not array.flags.c_contiguous or array.size == 0:
        return np.array(array, order="C")
    memory = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    memory.owner = array  # type: ignore[attr-defined]  # keeps the memory alive
    shared: NDArray[Any] = np.frombuffer(memoryview(memory), array.dtype)
    return shared.reshape(array.shape)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor as an array that shares its memory."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _FOREIGN_TO_NUMPY:
        _, bits = _INTEGERS[tensor.element_size()]
        return tensor.view(bits).numpy().view(getattr(ml_dtypes, name))
    array: NDArray[Any] = tensor.numpy()
    return array
