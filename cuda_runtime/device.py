"""A CUDA device, opened: CuPy's memory, the streams that work is asked of, and the graphs captured of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_runtime.cupy_api import cupy, open_device
from cuda_runtime.library import Library
from cuda_runtime.staging import PIECE_BYTES, Staging
from npu_compiler.artifact.describe import format_bytes
from npu_compiler.errors import DeviceError, InputError, OutOfMemoryError
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.backend import DeviceBuffer

__all__ = ["CUDABuffer", "CUDADevice", "Current", "Flag", "VisibleBuffer"]

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class CUDABuffer(DeviceBuffer):
    """A piece of a CUDA device's memory.

    Attributes:
        device: The device.
        array: The memory as a CuPy array of bytes. It keeps alive whatever owns the memory.
        pointer: Its address on the device.
    """

    part_bytes = PIECE_BYTES

    def __init__(self, device: CUDADevice, array: Any) -> None:
        self.device, self.array = device, array
        self.nbytes, self.pointer = int(array.nbytes), int(array.data.ptr)

    @property
    def owner(self) -> Any:
        """What all views of this memory share, and keep alive."""
        return self.array.data.mem

    @contextmanager
    def writing(self) -> Iterator[NDArray[np.uint8]]:
        with self.writing_part(0, self.nbytes) as content:
            yield content

    @contextmanager
    def writing_part(self, start: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        staging = self.device.staging
        with self.device.active():
            piece = staging.lend(nbytes)
        if piece is None:
            content = np.empty(nbytes, np.uint8)
            yield content
            with self.device.active():
                staging.upload(content, self.pointer + start)
            return
        try:
            yield piece.content[:nbytes]
            with self.device.active():
                staging.send(piece, self.pointer + start, nbytes)
        finally:
            staging.take_back(piece)

    def reading(self) -> NDArray[np.uint8]:
        with self.device.active():
            content = self.device.staging.download(self.pointer, self.nbytes)
        content.flags.writeable = False
        return content

    def copy_from(self, source: CUDABuffer) -> None:
        """Asks the device to copy what a buffer of the same size holds."""
        with self.device.active():
            self.array.data.copy_from_device_async(source.array.data, self.nbytes, self.device.stream)

    def overlaps(self, other: DeviceBuffer) -> bool:
        if not isinstance(other, CUDABuffer):
            return False
        return self.pointer < other.pointer + other.nbytes and other.pointer < self.pointer + self.nbytes

    def view(self, spec: BufferSpec) -> Any:
        """The tensor in this memory, or its codes, as a CuPy array of shape `spec.shape`, without a copy."""
        with self.device.active():
            flat = self.array[: spec.nbytes].view(spec.dtype.stored.numpy)
            return spec.layout.view(flat)


class VisibleBuffer(CUDABuffer):
    """Pinned memory of the host, which the device reaches over the bus.

    Attributes:
        content: The memory as the host sees it.
    """

    def __init__(self, device: CUDADevice, nbytes: int) -> None:
        """Takes it; what lies there is not promised."""
        memory = cupy().cuda.alloc_pinned_memory(max(nbytes, 1))
        self.content: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, nbytes)
        place = cupy().cuda.UnownedMemory(memory.ptr, nbytes, memory, device.ordinal)
        super().__init__(device, cupy().ndarray((nbytes,), cupy().uint8, cupy().cuda.MemoryPointer(place, 0)))

    @contextmanager
    def writing_part(self, start: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        yield self.content[start : start + nbytes]

    def reading(self) -> NDArray[np.uint8]:
        content = self.content.view()
        content.flags.writeable = False
        return content


class Flag:
    """A number in pinned memory, which kernels set and the host looks at.

    Attributes:
        array: A CuPy array uint32 [1].
    """

    def __init__(self, device: CUDADevice) -> None:
        memory = VisibleBuffer(device, 4)
        self._content = memory.content.data.cast("I")
        self._content[0] = 0
        self.array = memory.array.view(cupy().uint32)

    def taken(self) -> bool:
        """Whether it was set; it is not any more."""
        if not self._content[0]:
            return False
        self._content[0] = 0
        return True


class Current:
    """Makes a device the current one for a block, at little cost; `CUDADevice.active` also makes its stream so."""

    def __init__(self, device: CUDADevice) -> None:
        self._device, self._runtime = device, cupy().cuda.runtime
        self._before = device.ordinal

    def __enter__(self) -> None:
        self._before = self._runtime.getDevice()
        if self._before != self._device.ordinal:
            self._runtime.setDevice(self._device.ordinal)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._before != self._device.ordinal:
            self._runtime.setDevice(self._before)
        if isinstance(error, self._runtime.CUDARuntimeError):
            raise self._device.translated(error) from error


class CUDADevice:
    """A CUDA device. All its work is on one stream, so that what is asked for in order happens in order.

    Attributes:
        ordinal: Which of the machine's devices.
        name: What it calls itself.
        capability: Compute capability times ten.
        stream: CuPy's stream that everything runs on.
        second_stream: For captures and timed steps, which must not meet what others ask of the first; by `aside`.
        staging: Through which bytes cross between host and device.
    """

    def __init__(self, ordinal: int = 0) -> None:
        """Opens the device.

        Raises:
            DeviceError: There is no such device, its driver is too old, or it is below compute capability 7.0.
            MissingDependencyError: CuPy is not installed.
        """
        self.ordinal = ordinal
        self.name, self.capability = open_device(ordinal)
        self._device = cupy().cuda.Device(ordinal)
        with self._device:
            self.stream = cupy().cuda.Stream(non_blocking=True)
            self.second_stream = cupy().cuda.Stream(non_blocking=True)
        self.staging = Staging(self.stream)
        self._second_lock = RLock()
        self._library: Library | None = None

    @cached_property
    def order_event(self) -> Any:
        """For waits of one stream for another; its use is over with the call that orders them."""
        with self._device:
            return cupy().cuda.Event(disable_timing=True)

    def order(self, first: Any, then: Any) -> None:
        """Makes what is asked of the stream `then` from now on wait for what was asked of the stream `first`.

        Args:
            first, then: Streams of CuPy or torch, or their handles.

        Raises:
            InputError: One is no stream.
        """
        runtime, event = cupy().cuda.runtime, self.order_event
        runtime.eventRecord(event.ptr, _handle(first))
        runtime.streamWaitEvent(_handle(then), event.ptr)

    def current(self) -> Current:
        """Makes the device the current one, for a block; raises as `active` does."""
        return Current(self)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes the device and its stream the current ones.

        Raises:
            DeviceError: For what CUDA refuses or reports inside of the block.
        """
        with self._device, self.stream, self._translated():
            yield

    @contextmanager
    def aside(self) -> Iterator[Any]:
        """The second stream, for one thread at a time; the device is the current one. Raises as `active` does."""
        with self._second_lock, self._device, self._translated():
            yield self.second_stream

    def captured(self, ask: Callable[[], object]) -> Any:
        """A graph of what `ask` asks of the second stream.

        Raises:
            DeviceError: The device refused something.
        """
        with self.aside() as stream:
            stream.begin_capture()
            try:
                ask()
            except BaseException:
                with suppress(cupy().cuda.runtime.CUDARuntimeError):  # the first error says more
                    stream.end_capture()
                raise
            return stream.end_capture()

    def library(self) -> Library:
        """The vendor's library, opened when a plan first needs it; it works on the second stream.

        Raises:
            MissingDependencyError, DeviceError: As `Library`.
        """
        with self._second_lock, self.active():
            if self._library is None:
                self._library = Library(self.second_stream.ptr)
            return self._library

    def allocate(self, nbytes: int) -> CUDABuffer:
        with self.active():
            try:
                return CUDABuffer(self, cupy().empty(max(nbytes, 1), cupy().uint8)[:nbytes])
            except cupy().cuda.memory.OutOfMemoryError as error:
                raise self._too_little(nbytes) from error

    def copy_in(self, content: NDArray[np.uint8], buffer: DeviceBuffer) -> None:
        """Fills a buffer with bytes of the host, which may change when this returns."""
        assert isinstance(buffer, CUDABuffer)
        with self.active():
            self.staging.upload(content, buffer.pointer)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except cupy().cuda.runtime.CUDARuntimeError as error:
            raise self.translated(error) from error

    def translated(self, error: Any) -> DeviceError:
        """What CUDA reports as one of this project's errors."""
        if error.status == _OUT_OF_MEMORY:
            return self._too_little(None)
        return DeviceError(f"{self.name} reports {error}; see `npu doctor`")

    def _too_little(self, nbytes: int | None) -> OutOfMemoryError:
        free, total = cupy().cuda.runtime.memGetInfo()
        free += cupy().get_default_memory_pool().free_bytes()
        needed = "more" if nbytes is None else f"a buffer of {format_bytes(nbytes)}"
        return OutOfMemoryError(
            f"{self.name} has {format_bytes(free)} of {format_bytes(total)} free, {needed} is needed: use a smaller "
            "batch or a shorter cache, or free what else is on the device"
        )


def _handle(stream: Any) -> int:
    handle = stream if isinstance(stream, int) else getattr(stream, "ptr", getattr(stream, "cuda_stream", None))
    if not isinstance(handle, int):
        raise InputError(f"given a {type(stream).__name__} as stream, expected one of CuPy or torch, or its handle")
    return handle
