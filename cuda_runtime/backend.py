"""CUDA devices: CuPy's memory, one stream, plans as captured graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cuda_runtime.capability import fitting_options
from cuda_runtime.cupy_api import cupy, open_device
from cuda_runtime.plan import CUDAPlan
from cuda_runtime.tuning_results import TuningResults
from npu_compiler.codegen.plan import CallChoice, ExecutionPlan, KernelSource
from npu_compiler.describe import format_bytes
from npu_compiler.errors import OutOfMemoryError
from npu_compiler.layout import BufferSpec
from npu_runtime.backend import Backend, DeviceBuffer, Transfers

__all__ = ["CUDABackend", "CUDABuffer"]


class CUDABuffer(DeviceBuffer):
    """A piece of a CUDA device's memory.

    Attributes:
        backend: The device.
        array: The memory as a CuPy array of bytes. It keeps alive whatever owns the memory.
        pointer: Its address on the device.
    """

    def __init__(self, backend: CUDABackend, array: Any) -> None:
        self.backend, self.array = backend, array
        self.nbytes, self.pointer = int(array.nbytes), int(array.data.ptr)

    @contextmanager
    def writing(self) -> Iterator[NDArray[np.uint8]]:
        with self.backend.active():
            staging: NDArray[np.uint8] = self.backend.pinned(self.nbytes)
            yield staging
            self.array.set(staging, stream=self.backend.stream)
            self.backend.stream.synchronize()  # the staging memory may be reused now

    def reading(self) -> NDArray[np.uint8]:
        with self.backend.active():
            staging = self.backend.pinned(self.nbytes)
            self.array.get(stream=self.backend.stream, out=staging)
            self.backend.stream.synchronize()
            content: NDArray[np.uint8] = staging
        content.flags.writeable = False
        return content

    def copy_from(self, source: CUDABuffer) -> None:
        """Asks the device to copy what a buffer of the same size holds."""
        with self.backend.active():
            self.array.data.copy_from_device_async(source.array.data, self.nbytes, self.backend.stream)

    def view(self, spec: BufferSpec) -> Any:
        """The tensor in this memory as a CuPy array of shape `spec.shape`, without a copy."""
        with self.backend.active():
            flat = self.array[: spec.nbytes].view(spec.dtype.numpy)
            return spec.layout.view(flat)


class CUDABackend(Backend):
    """A CUDA device. All its work is on one stream, so that what is asked for in order happens in order.

    Attributes:
        ordinal: Which of the machine's devices.
        capability: Compute capability times ten.
        stream: CuPy's stream that everything runs on.
        results: What tuning found for this kind of device.
    """

    target = "cuda"

    def __init__(self, ordinal: int = 0) -> None:
        """Opens the device.

        Raises:
            DeviceError: There is no such device, its driver is too old, or it is below compute capability 7.0.
            MissingDependencyError: CuPy is not installed.
        """
        self.ordinal = ordinal
        self.name, self.capability = open_device(ordinal)
        self.transfers = Transfers()
        self.results = TuningResults(self.name, self.capability)
        self._device = cupy().cuda.Device(ordinal)
        with self._device:
            self.stream = cupy().cuda.Stream(non_blocking=True)

    @classmethod
    def open(cls, name: str, ordinal: int) -> Self:
        return cls(ordinal)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes the device and its stream the current ones."""
        with self._device, self.stream:
            yield

    def allocate(self, nbytes: int) -> CUDABuffer:
        with self.active():
            try:
                return CUDABuffer(self, cupy().empty(max(nbytes, 1), cupy().uint8)[:nbytes])
            except cupy().cuda.memory.OutOfMemoryError as error:
                free, total = cupy().cuda.runtime.memGetInfo()
                pool = cupy().get_default_memory_pool().free_bytes()
                raise OutOfMemoryError(
                    f"{self.name} has {format_bytes(free + pool)} of {format_bytes(total)} free, a buffer of "
                    f"{format_bytes(nbytes)} is needed: use a smaller batch or a shorter cache"
                ) from error

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that the device copies from and to at full speed."""
        memory = cupy().cuda.alloc_pinned_memory(max(nbytes, 1))
        return np.frombuffer(memory, np.uint8, nbytes)

    def select(self, choice: CallChoice, kernels: Sequence[KernelSource]) -> int:
        """The winner where this kind of device was tuned, else the first option that it can run."""
        fitting = fitting_options(choice, self.capability)
        known = self.results.times(choice, kernels) if len(fitting) > 1 else None
        return known.winner if known is not None and known.winner in fitting else fitting[0]

    def prepare(self, plan: ExecutionPlan) -> CUDAPlan:
        return CUDAPlan(self, plan)
