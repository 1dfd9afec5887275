"""How inputs reach the memory that a plan reads."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cuda_runtime.backend import SMALL_BYTES, CUDABackend
from cuda_runtime.conversion import Conversion
from cuda_runtime.copiers import by_torch, flat_tensor, tensor_at
from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDABuffer, Flag, VisibleBuffer
from cuda_runtime.tensor import checked_array
from npu_compiler.errors import InputError
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.buffer import NPUBuffer

__all__ = ["Copied", "FromHost", "InPlace", "Input", "Narrowed", "Overflow", "Rearranged", "staging_memory"]

_MOST_PINNED = 1 << 28  # bytes of a host's array that is made narrower in pinned memory of its own
_WORTHWHILE = 1 << 17  # bytes; fewer take PyTorch's threads longer to begin than to send
_SECTION = 2 << 20  # elements that are sent while the next ones are made

Overflow = Any  # a CuPy array on pinned memory, see `Conversion.ask`


class Input(ABC):
    """How an input reaches the memory that the plan reads.

    Attributes:
        pointer: The address of that memory.
        conversion: What happens in the graph, before the plan.
    """

    pointer: int
    conversion: Conversion | None = None

    def receive(self, value: Any) -> None:  # noqa: B027  # most have nothing to do
        """What happens at each run, before the graph."""

    def launched(self, stream: Any) -> None:  # noqa: B027
        """What happens at each run, behind the graph."""

    @abstractmethod
    def __init__(self) -> None: ...


class InPlace(Input):
    """Read where the caller has it."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer


class Rearranged(Input):
    """Converted from where the caller has it, which is the same place at each run."""

    def __init__(self, source: Any, memory: CUDABuffer, spec: BufferSpec) -> None:
        """Args:
        source: The caller's tensor as a CuPy array of shape `spec.shape`; its memory is not kept alive.
        memory: Where it goes.
        spec: What the plan reads.
        """
        self.pointer = memory.pointer
        self.conversion = Conversion(source, memory.view(spec))


class Copied(Input):
    """Copied, and converted where it must be, from wherever the caller has it."""

    def __init__(self, device: CUDABackend, memory: CUDABuffer, spec: BufferSpec, overflow: Overflow) -> None:
        """Args:
        device: The device.
        memory: Where it goes.
        spec: What the plan reads.
        overflow: What is set where a value is too large.
        """
        self.pointer, self._device, self._spec = memory.pointer, device, spec
        self._target, self._overflow = memory.view(spec), overflow

    def receive(self, value: Any) -> None:
        source = cast(CUDABuffer, value.data).view(self._spec) if isinstance(value, NPUBuffer) else None
        if source is None:
            source = checked_array(value, self._device, self._spec)
        with self._device.active():
            Conversion(source, self._target).ask(self._device.stream, self._overflow)


class FromHost(Input):
    """Sent over the bus as it is on the host, and converted on the device."""

    def __init__(
        self, device: CUDABackend, memory: CUDABuffer, spec: BufferSpec, dtype: np.dtype[Any], flag: Overflow
    ) -> None:
        """Args:
        device: The device.
        memory: Where it goes.
        spec: What the plan reads.
        dtype: Of the caller's array, which has `spec.shape`.
        flag: What is set where a value is too large; None for that of the run.
        """
        self.pointer, self._device = memory.pointer, device
        nbytes = prod(spec.shape) * dtype.itemsize
        staged = staging_memory(device, nbytes)
        with device.active():
            stored = spec.dtype.stored.numpy if dtype == spec.dtype.numpy else dtype
            source = staged.array[:nbytes].view(stored).reshape(spec.shape)
        is_visible = isinstance(staged, VisibleBuffer)
        self._memory, self.conversion = staged, Conversion(source, memory.view(spec), from_host=is_visible, flag=flag)
        self._staged = staged.pointer
        self._pinned: NDArray[Any] | None = None
        if isinstance(staged, VisibleBuffer):
            self._pinned = staged.content[:nbytes].view(dtype).reshape(spec.shape)
            self._read = cupy().cuda.Event(disable_timing=True)

    def receive(self, value: Any) -> None:
        if self._pinned is None:
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            self._device.staging.upload(flat, self._staged)
            return
        self._read.synchronize()  # the run before may still have to read what lies there
        self._pinned[...] = value

    def launched(self, stream: Any) -> None:
        if self._pinned is not None:
            self._read.record(stream)


class Narrowed(Input):
    """Made narrower by PyTorch's threads on its way into pinned memory, so that half as many bytes cross the bus.

    They don't see where a number becomes infinite. The device notes infinities, and then the host looks at the array,
    which must not change until it has: it is for runs that are waited for.
    """

    def __init__(self, device: CUDABackend, memory: CUDABuffer, spec: BufferSpec, checked: bool) -> None:
        """Args:
        device: The device.
        memory: Where it goes.
        spec: What the plan reads.
        checked: Whether numbers that became infinite are looked for.
        """
        self.pointer, self._device, self._spec, self._checked = memory.pointer, device, spec, checked
        self._size = prod(spec.shape) * spec.dtype.size
        self._pinned = device.allocate_visible(self._size)
        is_small = self._size <= SMALL_BYTES
        self._crossed = self._pinned if is_small else device.allocate(self._size)
        torch = sys.modules["torch"]
        with torch.inference_mode(False):  # such tensors may be written to in that mode and outside of it
            self._target = tensor_at(self._pinned.pointer, self._size).view(getattr(torch, spec.dtype.name))
            self._sections = self._target.split(_SECTION)
        with device.active():
            source = self._crossed.array.view(spec.dtype.numpy).reshape(spec.shape)
            self._read, self._infinite = cupy().cuda.Event(disable_timing=True), Flag(device)
        self.conversion = Conversion(
            source, memory.view(spec), from_host=is_small, flag=self._infinite.array, notes_infinity=True
        )
        self._value: Any = None

    @staticmethod
    def serves(spec: BufferSpec, value: NDArray[Any]) -> bool:
        """Whether an array may come so."""
        is_worthwhile = _WORTHWHILE <= value.nbytes <= _MOST_PINNED
        narrower = value.dtype == np.float32 and spec.dtype.is_float and spec.dtype.size == 2
        return is_worthwhile and narrower and value.flags.c_contiguous and by_torch()

    def receive(self, value: Any) -> None:
        self._read.synchronize()  # the run before may still have to read what lies there
        if self._crossed is self._pinned:
            self._target.copy_(flat_tensor(value))
        else:
            self._send(flat_tensor(value))
        self._value = value

    def _send(self, numbers: Any) -> None:
        runtime, stream = cupy().cuda.runtime, self._device.stream
        to, begin = self._crossed.pointer, self._pinned.pointer
        for source, target in zip(numbers.split(_SECTION), self._sections, strict=True):
            target.copy_(source)
            runtime.memcpyAsync(to, begin, target.nbytes, runtime.memcpyDefault, stream.ptr)
            to, begin = to + target.nbytes, begin + target.nbytes

    def launched(self, stream: Any) -> None:
        self._read.record(stream)

    def refusal(self) -> InputError | None:
        """What to say, once the run is over, where the array has finite numbers that became infinite."""
        value, self._value = self._value, None
        if not self._infinite.taken() or value is None or not self._checked:
            return None
        with np.errstate(over="ignore"):
            lost = (np.isinf(value.astype(self._spec.dtype.numpy)) & np.isfinite(value)).any()
        return self._spec.too_large(value) if lost else None


def staging_memory(device: CUDABackend, nbytes: int) -> CUDABuffer:
    """Memory for a tensor as the host has it: pinned for a small one, else on the device."""
    return device.allocate_visible(nbytes) if nbytes <= SMALL_BYTES else device.allocate(nbytes)
