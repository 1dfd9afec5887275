"""Arrays of any library as numpy arrays and back, in the same memory wherever both can name it.

PyTorch is imported only where one of its tensors is asked for: what was given one has imported it already.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import DType, dtype
from npu_compiler.errors import InputError

if TYPE_CHECKING:
    import torch

__all__ = [
    "as_array",
    "codes_of",
    "copied",
    "described",
    "from_device",
    "is_array",
    "like",
    "on_host",
    "rounded",
    "to_numpy",
    "to_torch",
]

Array = NDArray[Any]

_INTEGERS = {1: "uint8", 2: "int16"}  # as which the bits travel of what numpy knows from ml_dtypes and torch by itself
_CPU = (1, 3)  # DLPack's numbers of memory that the host reads: its own, and what is pinned in it
_TAKEN = "a numpy array, a tensor of torch, or anything else with __array__, DLPack or the buffer protocol"


def is_array(value: object) -> bool:
    """Whether `as_array` can make a numpy array of it."""
    if isinstance(value, type):
        return False
    return isinstance(value, np.ndarray | np.generic | memoryview | bytearray) or any(
        hasattr(value, name) for name in ("__array__", "__dlpack__", "__buffer__")
    )


def on_host(value: Any) -> bool:
    """Whether the memory of an array is the host's; what does not say where it lies is."""
    if type(value) is np.ndarray:
        return True
    if _is_torch(value):
        return bool(value.device.type == "cpu")
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[0]) in _CPU
    return not hasattr(value, "__cuda_array_interface__")


def as_array(value: Any, what: str = "the array") -> Array:
    """The value as a numpy array, bfloat16 included; in its own memory where numpy can read that.

    Args:
        value: An array or tensor, on the host or on a device.
        what: What it is for, for messages.

    Raises:
        InputError: It is no array, or has a dtype or a layout that numpy has not.
    """
    if type(value) is np.ndarray:
        return value
    if not is_array(value):
        raise InputError(f"{what}: given a {type(value).__name__}, expected {_TAKEN}")
    try:
        array = to_numpy(value) if _is_torch(value) else _converted(value)
    except (AttributeError, BufferError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"{what}: given a {type(value).__name__} that numpy cannot read ({_first_line(error)}); give a dense "
            "tensor with values, copied to the host"
        ) from error
    if array.dtype == object:
        raise InputError(f"{what}: given a {type(value).__name__} of objects, expected numbers")
    return array


def described(value: Any) -> tuple[tuple[int, ...], str] | None:
    """Shape and name of the data type of a tensor, without touching its values; None where it does not say them."""
    shape, kind = getattr(value, "shape", None), getattr(value, "dtype", None)
    return None if shape is None or kind is None else (tuple(shape), str(kind).removeprefix("torch."))


def copied(value: Any) -> Any:
    """A copy of a tensor where it lies; on the host where its library has no copy that this project knows."""
    if _is_torch(value):
        return value.detach().clone()
    if _is_cupy(value):
        return value.copy()
    if hasattr(value, "__array_namespace__"):
        return value.__array_namespace__().asarray(value, copy=True)
    return as_array(value)


def rounded(value: Any, kind: DType) -> Array:
    """A tensor of the host as an array that a device stores as it is: the lowest float32 of a mask becomes -inf.

    Args:
        value: An array or tensor.
        kind: What the device stores; where that is no floating-point type, the array's own stays.
    """
    if kind.is_float and _is_torch(value) and value.dtype is _torch_dtype("float32"):
        return to_numpy(value.to(_torch_dtype(kind.name)))  # on all processors
    array = as_array(value)
    if not kind.is_float or array.dtype == kind.numpy:
        return array
    with np.errstate(over="ignore"):
        return array.astype(kind.numpy)


def like(array: Array, example: Any) -> Any:
    """The array in the library of `example` and on its device; in the array's own memory where that is the host."""
    if _is_torch(example):
        return to_torch(array).to(example.device)
    if _is_cupy(example):
        return sys.modules["cupy"].asarray(array)
    if not isinstance(example, np.ndarray) and hasattr(example, "__array_namespace__"):
        return example.__array_namespace__().asarray(array)
    return array


def from_device(tensor: Any, kind: str, example: Any) -> Any:
    """A tensor of a GPU in the library of `example`, which lies on that GPU; copied only to be converted.

    Args:
        tensor: Anything with DLPack.
        kind: Name of the data type that it shall have, where torch or CuPy takes it.
        example: A tensor of that library.
    """
    if _is_torch(example):
        torch = sys.modules["torch"]
        made, wanted = torch.from_dlpack(tensor), getattr(torch, kind)
        return made.view(wanted) if dtype(kind).coding is not None else made.to(example.device, wanted)
    if _is_cupy(example):
        return tensor.array.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind, copy=False)
    return example.__array_namespace__().from_dlpack(tensor)


def codes_of(value: Any, kind: DType) -> Any | None:
    """The codes of a tensor of torch, in its own memory, where it is of a data type that has any; else None."""
    if kind.coding is None or not _is_torch(value) or str(value.dtype) != f"torch.{kind.name}":
        return None
    return value.view(_torch_dtype(kind.stored.name))


def to_torch(array: Array) -> torch.Tensor:
    """The array as a tensor. The two share memory, unless the array's strides are none that torch has.

    A read-only array is shared too: whoever computes in place has to work on a copy.
    """
    import torch

    kind = getattr(torch, array.dtype.name, None)
    if array.dtype.type.__module__ == ml_dtypes.__name__ and kind is not None and kind.is_floating_point:
        return to_torch(array.view(_INTEGERS[array.dtype.itemsize])).view(kind)
    if any(stride < 0 or stride % array.itemsize for stride in array.strides) or not array.dtype.isnative:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array if array.flags.writeable else _writable(array))


def _writable(array: Array) -> Array:
    """The same memory under another name: torch warns of arrays that it may not write, and never writes these."""
    if not array.flags.c_contiguous or array.size == 0:
        return np.array(array, order="C")
    memory = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    memory.owner = array  # type: ignore[attr-defined]  # keeps the memory alive
    shared: Array = np.frombuffer(memoryview(memory), array.dtype)
    return shared.reshape(array.shape)


def to_numpy(tensor: torch.Tensor) -> Array:
    """The tensor as an array that shares its memory."""
    if tensor.requires_grad or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    foreign = _as_bits(tensor.dtype)
    array: Array = tensor.numpy() if foreign is None else tensor.view(foreign[0]).numpy().view(foreign[1])
    return array


@cache
def _torch_dtype(name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, name)
    return found


@cache
def _as_bits(kind: torch.dtype) -> tuple[torch.dtype, Any] | None:
    """For a dtype that numpy has only from ml_dtypes, the integers it travels as, and what ml_dtypes calls it."""
    import torch

    name = str(kind).removeprefix("torch.")
    own = getattr(ml_dtypes, name, None)
    return None if own is None or not kind.is_floating_point else (getattr(torch, _INTEGERS[kind.itemsize]), own)


def _converted(value: Any) -> Array:
    if _is_cupy(value):
        return np.asarray(value.get())
    if hasattr(value, "__array__") or not hasattr(value, "__dlpack__"):
        return np.asarray(value)
    return np.from_dlpack(value)


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_cupy(value: object) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0].rstrip(".")
