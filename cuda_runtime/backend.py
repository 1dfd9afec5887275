"""CUDA devices for the runtime: memory, the choice between options, plans as captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Self

from numpy.typing import NDArray

from cuda_runtime.capability import fitting_options
from cuda_runtime.device import CUDABuffer, CUDADevice, VisibleBuffer
from cuda_runtime.plan import CUDAPlan
from cuda_runtime.recording import CUDARecording
from cuda_runtime.tuning_results import TuningResults
from npu_compiler.codegen.plan import CallChoice, ExecutionPlan, KernelSource
from npu_compiler.layout import BufferSpec
from npu_compiler.memory import ALIGNMENT
from npu_runtime.backend import Backend, BoundPlan, DeviceBuffer, Transfers

__all__ = ["CUDABackend"]


class CUDABackend(CUDADevice, Backend):
    """A CUDA device as the runtime wants one.

    Attributes:
        results: What tuning found for this kind of device.
    """

    target = "cuda"
    runs_ahead = True
    executor_class = ("cuda_runtime.executor", "CUDAExecutor")

    def __init__(self, ordinal: int = 0) -> None:
        """Opens the device; raises as `CUDADevice` does."""
        super().__init__(ordinal)
        self.transfers = Transfers()
        self.results = TuningResults(self.name, self.capability)

    @classmethod
    def open(cls, name: str, ordinal: int) -> Self:
        return cls(ordinal)

    def allocate_all(self, sizes: Sequence[int]) -> list[DeviceBuffer]:
        """As `Backend.allocate_all`: pieces of one allocation, because the driver rounds each up to 2 MiB."""
        ends = list(accumulate(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes))
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

    def write(self, array: NDArray[Any], spec: BufferSpec, buffer: DeviceBuffer) -> None:
        self.copy_in(spec.encode_bytes(array), buffer)

    def select(self, choice: CallChoice, kernels: Sequence[KernelSource]) -> int:
        """The winner where this kind of device was tuned, else the first option that it can run."""
        fitting = fitting_options(choice, self.capability)
        known = self.results.times(choice, kernels) if len(fitting) > 1 else None
        return known.winner if known is not None and known.winner in fitting else fitting[0]

    def prepare(self, plan: ExecutionPlan) -> CUDAPlan:
        return CUDAPlan(self, plan)

    def record(self, bound: Sequence[BoundPlan]) -> CUDARecording:
        return CUDARecording(self, bound)
