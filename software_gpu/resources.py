"""Memory and sizes as Metal has them, on the host."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import DeviceError
from software_gpu.shared_memory import Range, shared_memory

__all__ = ["BytesLike", "MTLBuffer", "MTLSize", "MTLSizeMake", "NSRange"]

BytesLike = bytes | bytearray | memoryview | mmap.mmap | NDArray[np.generic]


class MTLSize(NamedTuple):
    """Width, height and depth, in threads or in threadgroups."""

    width: int
    height: int
    depth: int


def MTLSizeMake(width: int, height: int, depth: int) -> MTLSize:
    return MTLSize(width, height, depth)


class NSRange(NamedTuple):
    """A range of bytes."""

    location: int
    length: int


class _Contents:
    """What pyobjc gives for a pointer of unknown length."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def as_buffer(self, count: int) -> memoryview:
        """The first `count` bytes, writable."""
        if not 0 <= count <= len(self._view):
            raise DeviceError(f"a buffer of {len(self._view)} bytes has no {count} bytes; ask for its length() at most")
        return self._view[:count]


class MTLBuffer:
    """Page-aligned memory that host and kernels read and write in place.

    Made by a device.

    Attributes:
        address: Where kernels find it.
        span: The address, and how many bytes it has.
    """

    def __init__(
        self, memory: Range | NDArray[np.uint8], address: int, callers: NDArray[np.uint8] | None = None
    ) -> None:
        """A buffer over memory that the device has.

        Args:
            memory: The memory.
            address: Where it begins.
            callers: Memory that the device has not, and whose content is in `memory` while commands run.
        """
        self._held, self._callers = memory, callers
        self._length = memory.nbytes
        self._label: str | None = None
        self.address = address
        self.span = (address, self._length)

    @cached_property
    def _memory(self) -> NDArray[np.uint8]:
        """Made when the host looks at it: most results are another kernel's before."""
        return np.asarray(self._held)

    def length(self) -> int:
        return self._length

    def contents(self) -> _Contents:
        return _Contents((self._memory if self._callers is None else self._callers).data)

    def part(self, start: int, length: int) -> MTLBuffer:
        """A buffer over `length` bytes of this one."""
        return MTLBuffer(self._memory[start : start + length], self.address + start)

    def lend(self) -> None:
        """Gives the device what the caller's memory holds."""
        if self._callers is not None:
            self._memory[:] = self._callers

    def take_back(self) -> None:
        """Gives the caller's memory what the device made of it."""
        if self._callers is not None and self._callers.flags.writeable:
            self._callers[:] = self._memory

    def label(self) -> str | None:
        return self._label

    def setLabel_(self, label: str) -> None:
        self._label = label


def allocate(length: int) -> MTLBuffer:
    """A zeroed buffer of `length` bytes; pages take memory when they are first touched."""
    if length <= 0:
        raise DeviceError(f"a buffer of {length} bytes was asked for; Metal makes none below 1 byte")
    memory = shared_memory().allocate(length)
    return MTLBuffer(memory, memory.address)


def as_bytes(data: BytesLike, length: int, what: str) -> NDArray[np.uint8]:
    """The first `length` bytes of `data`, not copied."""
    flat = np.frombuffer(data, np.uint8)
    if not 0 < length <= flat.nbytes:
        raise DeviceError(f"{what}: {length} bytes were announced and {flat.nbytes} given; pass the true length")
    return flat[:length]


def wrap(data: BytesLike, length: int) -> MTLBuffer:
    """A buffer over memory that the caller owns: page aligned, whole pages, as Metal wants it.

    The device is another process and can't reach that memory, so commands that use it begin and end with a copy.
    """
    memory = as_bytes(data, length, "newBufferWithBytesNoCopy")
    if memory.ctypes.data % mmap.PAGESIZE or length % mmap.PAGESIZE:
        raise DeviceError(
            f"newBufferWithBytesNoCopy: address {memory.ctypes.data:#x} and length {length} must be multiples of the "
            f"page size {mmap.PAGESIZE}. Copy the bytes with newBufferWithBytes_length_options_ instead"
        )
    own = allocate(length)
    buffer = MTLBuffer(own._memory, own.address, memory)
    _of_callers.add(buffer)
    return buffer


_of_callers: weakref.WeakSet[MTLBuffer] = weakref.WeakSet()


def any_of_callers() -> bool:
    """Whether any buffer lies in memory that its caller owns."""
    return bool(_of_callers)


@contextmanager
def lent(buffers: Collection[MTLBuffer]) -> Iterator[None]:
    """Has the device's copy of callers' memory be current within the block, and theirs after it."""
    for buffer in buffers:
        buffer.lend()
    yield
    for buffer in buffers:
        buffer.take_back()
