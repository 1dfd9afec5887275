"""What callers give as inputs, told apart quickly: its form, where it lies, and whose stream makes it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDABuffer
from npu_runtime.buffer import NPUBuffer

__all__ = ["HOST", "Given", "Span", "recognized", "span"]

HOST = 0  # the address of what lies on the host


class Given(NamedTuple):
    """An input as it was given.

    Attributes:
        form: Equal for tensors of one kind of object, dtype, shape and strides on one device.
        address: In device memory; `HOST` where it must cross first.
        producer: Handle of the stream that whoever made it uses; None on the host.
    """

    form: tuple[Any, ...]
    address: int
    producer: int | None


def recognized(value: Any) -> Given | None:
    """What there is to know of a tensor, without touching it; None for kinds that must be adopted each time."""
    if isinstance(value, np.ndarray):
        return Given(("numpy", value.dtype, value.shape, value.flags.c_contiguous), HOST, None)
    if isinstance(value, NPUBuffer):
        data = value.data
        if not isinstance(data, CUDABuffer):
            return None
        kind = ("npu", id(value.spec), data.device.ordinal, data.nbytes)
        return Given(kind, data.pointer, data.device.stream.ptr)
    module = type(value).__module__
    if module == "torch" and value.is_cuda:
        ordinal = value.device.index
        producer = sys.modules["torch"].cuda.current_stream(ordinal).cuda_stream
        return Given(("torch", value.dtype, value.shape, value.stride(), ordinal), value.data_ptr(), producer)
    if module.startswith("cupy") and isinstance(value, cupy().ndarray):
        form = ("cupy", value.dtype, value.shape, value.strides, value.device.id)
        return Given(form, value.data.ptr, cupy().cuda.get_current_stream().ptr)
    return None


class Span(NamedTuple):
    """Addresses of device memory, from `start` to before `stop`."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        """Whether an address is in both."""
        return self.start < other.stop and other.start < self.stop


def span(value: Any) -> Span:
    """The device memory from a tensor's first byte to its last; none on the host."""
    known = recognized(value)
    if known is None or known.address == HOST:
        return Span(HOST, HOST)
    if isinstance(value, NPUBuffer):
        nbytes = value.data.nbytes
    else:
        strides = value.strides if known.form[0] == "cupy" else [n * value.itemsize for n in value.stride()]
        shape = tuple(value.shape)
        reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
        below = sum(each for each in reach if each < 0)
        nbytes = sum(reach) - 2 * below + value.itemsize if all(shape) else 0
        return Span(known.address + below, known.address + below + nbytes)
    return Span(known.address, known.address + nbytes)
