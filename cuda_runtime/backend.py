"""CUDA devices for the runtime: memory, the choice between options, plans as captured graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from threading import Lock
from time import perf_counter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cuda_runtime.capability import filled_share, fitting_options
from cuda_runtime.conversion import Conversion
from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDABuffer, CUDADevice, Flag, VisibleBuffer
from cuda_runtime.plan import CUDAPlan
from cuda_runtime.recording import CUDARecording
from cuda_runtime.tuning_results import TuningResults
from npu_compiler.artifact.memory import ALIGNMENT
from npu_compiler.artifact.plan import CallChoice, ExecutionPlan, KernelSource
from npu_compiler.dtypes import BFLOAT16
from npu_compiler.integers import ceil_div
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime.backend import Backend, BoundPlan, DeviceBuffer, Transfers
from npu_runtime.tuning import OptionTimes

__all__ = ["SMALL_BYTES", "CUDABackend"]

SMALL_BYTES = 1 << 20  # of a tensor on the host that the device reads or writes over the bus while it converts
_WORTHWHILE = 1 << 16  # bytes; fewer are converted on the host in the time that a launch takes


class CUDABackend(CUDADevice, Backend):
    """A CUDA device as the runtime wants one.

    Attributes:
        results: What tuning found for this kind of device.
        overlapping: How many executors choose for running at once.
    """

    target = "cuda"
    runs_ahead = True
    executor_class = ("cuda_runtime.executor", "CUDAExecutor")

    def __init__(self, ordinal: int = 0, overlapping: int = 1) -> None:
        """Opens the device; raises as `CUDADevice` does."""
        super().__init__(ordinal)
        self.overlapping = overlapping
        self.transfers = Transfers()
        self.results = TuningResults(self.name, self.capability)
        self._converting, self._landing = Lock(), Lock()

    @classmethod
    def open(cls, name: str, ordinal: int) -> Self:
        return cls(ordinal)

    @cached_property
    def _attributes(self) -> Mapping[str, int]:
        """Of the device, by CuPy's names for them."""
        found: Mapping[str, int] = cupy().cuda.Device(self.ordinal).attributes
        return found

    @cached_property
    def _lost(self) -> Flag:
        """What conversions of uploads set; one at a time looks at it."""
        with self.active():
            return Flag(self)

    @cached_property
    def _scratch(self) -> VisibleBuffer:
        """What the host has, for a conversion that reads it over the bus; one at a time."""
        return self.allocate_visible(SMALL_BYTES)

    @cached_property
    def _landed(self) -> VisibleBuffer:
        """Where small tensors reach the host; one at a time."""
        return self.allocate_visible(_WORTHWHILE)

    def sibling(self, overlapping: int = 1) -> Self:
        """The same device with streams of its own; what one makes is waited for where another reads it."""
        return type(self)(self.ordinal, overlapping)

    def shares_memory_with(self, other: Backend) -> bool:
        return isinstance(other, CUDABackend) and other.ordinal == self.ordinal

    def wait_for(self, other: Backend) -> None:
        assert isinstance(other, CUDABackend)
        if other is not self:
            with self.current():
                self.order(other.stream, self.stream)

    def allocate_all(self, sizes: Sequence[int]) -> list[DeviceBuffer]:
        """As `Backend.allocate_all`: pieces of one allocation, because the driver rounds each up to 2 MiB."""
        ends = list(accumulate(ceil_div(nbytes, ALIGNMENT) * ALIGNMENT for nbytes in sizes))
        whole = self.allocate(ends[-1] if ends else 0)
        with self.active():
            starts = [0, *ends[:-1]]
            return [CUDABuffer(self, whole.array[at : at + size]) for at, size in zip(starts, sizes, strict=False)]

    def allocate_visible(self, nbytes: int) -> VisibleBuffer:
        with self.active():
            return VisibleBuffer(self, nbytes)

    def clear(self, buffer: DeviceBuffer) -> None:
        assert isinstance(buffer, CUDABuffer)
        if buffer.nbytes:
            with self.active():
                buffer.array.data.memset_async(0, buffer.nbytes, self.stream)

    def upload(self, array: NDArray[Any], spec: BufferSpec) -> DeviceBuffer:
        """As `Backend.upload`; what must be converted crosses as it is, and is converted on the device."""
        spec.check(array)
        on_host = array.dtype.name == "bfloat16" or spec.dtype.coding is not None
        if array.nbytes < _WORTHWHILE or array.dtype == spec.dtype.numpy or on_host:
            return super().upload(array, spec)
        started = perf_counter()
        buffer = self.allocate(spec.nbytes)
        if spec.layout.is_padded:
            self.clear(buffer)
        with self._converting, self.active():
            if array.nbytes <= SMALL_BYTES:
                crossed: CUDABuffer = self._scratch
                self._scratch.content[: array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
            else:
                crossed = self.allocate(array.nbytes)
                self.staging.upload(np.ascontiguousarray(array).reshape(-1).view(np.uint8), crossed.pointer)
            source = crossed.array[: array.nbytes].view(array.dtype).reshape(array.shape)
            Conversion(source, buffer.view(spec)).ask(self.stream, self._lost.array)
            self.stream.synchronize()
            if self._lost.taken():
                raise spec.too_large(array)  # integers were looked at above
        self.transfers.uploads.add(spec.nbytes, perf_counter() - started)
        return buffer

    def download(self, buffer: DeviceBuffer, spec: BufferSpec) -> NDArray[Any]:
        """As `Backend.download`; what must be converted is converted on the device, unless it is small."""
        assert isinstance(buffer, CUDABuffer)
        if spec.nbytes < _WORTHWHILE and buffer.device is self and not isinstance(buffer, VisibleBuffer):
            return self._small(buffer, spec)
        dense_there = BufferSpec(spec.name, spec.host_dtype, spec.host_dtype, dense(spec.shape))
        same = spec.dtype == spec.host_dtype and spec.layout.strides == dense_there.layout.strides
        on_host = BFLOAT16 in (spec.dtype, spec.host_dtype) or spec.dtype.coding is not None
        if same or spec.nbytes < _WORTHWHILE or on_host:
            return super().download(buffer, spec)
        converted = self.allocate(dense_there.nbytes)
        with self.active():
            Conversion(buffer.view(spec), converted.view(dense_there)).ask(self.stream, self._lost.array)
        return super().download(converted, dense_there)

    def _small(self, buffer: CUDABuffer, spec: BufferSpec) -> NDArray[Any]:
        """A small tensor, by one copy to pinned memory that is there for all of them."""
        started = perf_counter()
        runtime, stream = cupy().cuda.runtime, self.stream.ptr
        with self._landing, self.current():
            landed = self._landed
            if spec.nbytes:
                runtime.memcpyAsync(landed.pointer, buffer.pointer, spec.nbytes, runtime.memcpyDefault, stream)
            runtime.streamSynchronize(stream)
            array = spec.decode(landed.content[: spec.nbytes])
        self.transfers.downloads.add(spec.nbytes, perf_counter() - started)
        return array

    def write(self, array: NDArray[Any], spec: BufferSpec, buffer: DeviceBuffer) -> None:
        self.copy_in(spec.encode_bytes(array), buffer)

    def select(self, choice: CallChoice, kernels: Sequence[KernelSource]) -> int:
        """The winner where this kind of device was tuned, else the first option that it can run."""
        fitting = fitting_options(choice, self.capability)
        known = self.results.times(choice, kernels) if len(fitting) > 1 else None
        if known is None or known.winner not in fitting:
            return fitting[0]
        return known.winner if self.overlapping == 1 else self._best_beside_others(choice, known)

    def _best_beside_others(self, choice: CallChoice, known: OptionTimes) -> int:
        """The option that leaves the others most of the device.

        Of n runs at once each gets on by an nth of its time while the others do, or, where an option fills the device,
        by the share that it fills: what counts is the time by itself, times the sum of both. It was found by trying
        such formulas on ResNet-18 and 50 with two, four and eight streams, on one NVIDIA H200.
        """
        costs = {
            number: taken * (1 / self.overlapping + filled_share(option, self._attributes))
            for number, (option, taken) in enumerate(zip(choice.options, known.microseconds, strict=True))
            if taken is not None
        }
        return min(costs, key=lambda number: costs[number])

    def prepare(self, plan: ExecutionPlan) -> CUDAPlan:
        return CUDAPlan(self, plan)

    def record(self, bound: Sequence[BoundPlan]) -> CUDARecording:
        return CUDARecording(self, bound)
