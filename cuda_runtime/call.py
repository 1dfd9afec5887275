"""A run as it is for inputs of one form: what to copy, and the graphs that do the rest."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cuda_runtime.backend import SMALL_BYTES, CUDABackend
from cuda_runtime.conversion import Conversion, ask_all
from cuda_runtime.copiers import by_torch, flat_tensor, tensor_at
from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDABuffer, Flag, VisibleBuffer
from cuda_runtime.output_ring import OutputSet
from cuda_runtime.plan import CUDAPlan
from cuda_runtime.tensor import checked_array
from npu_compiler.dtypes import DType
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime.buffer import NPUBuffer

__all__ = ["Call", "Copied", "FromHost", "Input", "InPlace", "Narrowed", "Rearranged", "Results"]

_MAX_GRAPHS = 8
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
            narrow = tensor_at(self._pinned.pointer, self._size).view(getattr(torch, spec.dtype.name))
            self._targets = narrow.split(_SECTION)
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
        runtime, stream, at = cupy().cuda.runtime, self._device.stream, 0
        to, begin = self._crossed.pointer, self._pinned.pointer
        for source, target in zip(flat_tensor(value).split(_SECTION), self._targets, strict=True):
            target.copy_(source)
            if to != begin:
                runtime.memcpyAsync(to + at, begin + at, target.nbytes, runtime.memcpyDefault, stream.ptr)
                at += target.nbytes
        self._value = value

    def launched(self, stream: Any) -> None:
        self._read.record(stream)

    def check(self) -> None:
        """Once the run is over: raises InputError where the array has finite numbers that became infinite."""
        value, self._value = self._value, None
        if not self._infinite.taken() or value is None or not self._checked:
            return
        with np.errstate(over="ignore"):
            if (np.isinf(value.astype(self._spec.dtype.numpy)) & np.isfinite(value)).any():
                raise self._spec.too_large(value)


def staging_memory(device: CUDABackend, nbytes: int) -> CUDABuffer:
    """Memory for a tensor as the host has it: pinned for a small one, else on the device."""
    return device.allocate_visible(nbytes) if nbytes <= SMALL_BYTES else device.allocate(nbytes)


class Results:
    """Outputs on their way to the host: converted on the device, and read when they are there."""

    def __init__(self, device: CUDABackend, tensors: Mapping[str, Any], dtypes: Mapping[str, DType]) -> None:
        """Args:
        device: The device.
        tensors: The outputs, as `CUDATensor`.
        dtypes: Their data types on the host, where these are not those that the model declares.
        """
        self._device, self._names = device, list(tensors)
        self._conversions: list[Conversion] = []
        self._visible: dict[str, NDArray[Any]] = {}
        self._large: dict[str, tuple[CUDABuffer, BufferSpec]] = {}
        for name, tensor in tensors.items():
            kind = dtypes.get(name, tensor.spec.host_dtype)
            spec = BufferSpec(name, kind, kind, dense(tensor.spec.shape))
            memory = staging_memory(device, spec.nbytes)
            if isinstance(memory, VisibleBuffer):
                self._visible[name] = memory.content.view(spec.dtype.numpy).reshape(spec.shape)
            else:
                self._large[name] = memory, spec
            self._conversions.append(Conversion(tensor.array, memory.view(spec)))

    def ask(self, stream: Any, overflow: Overflow) -> None:
        """What happens in the graph, behind the plan."""
        ask_all(self._conversions, stream, overflow)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The outputs as new arrays, once the device is done."""
        found = {name: array.copy() for name, array in self._visible.items()}
        for name, (memory, spec) in self._large.items():
            with self._device.active():
                flat = self._device.staging.download(memory.pointer, spec.nbytes)
            found[name] = flat.view(spec.dtype.numpy).reshape(spec.shape)
        return {name: found[name] for name in self._names}


class Call:
    """A run for inputs of one form."""

    def __init__(
        self,
        device: CUDABackend,
        plan: CUDAPlan,
        pointers: Sequence[int],
        inputs: Sequence[tuple[int, int, Input]],
        overflow: Overflow,
        kept: object,
    ) -> None:
        """Args:
        device: The device.
        plan: The plan.
        pointers: The address of each of the plan's buffers; those of inputs and outputs are filled in.
        inputs: How inputs are taken: their places among the values, the numbers of their buffers, and the ways.
        overflow: What is set where a value of theirs is too large.
        kept: What must live as long as the call.
        """
        self._device, self._plan, self._overflow, self._kept = device, plan, overflow, kept
        self._pointers, self._inputs = list(pointers), tuple((place, each) for place, _, each in inputs)
        for _, number, each in inputs:
            self._pointers[number] = each.pointer
        self._graphs: OrderedDict[object, Any] = OrderedDict()

    def launch(
        self, values: Sequence[Any], numbers: Mapping[str, int], outputs: OutputSet, results: Results | None
    ) -> Any:
        """Asks the device's stream for a run.

        Args:
            values: The inputs.
            numbers: The number of the buffer of each output.
            outputs: Where they go.
            results: What brings them to the host, if that is wanted.

        Returns:
            The graph; None where the plan has nothing to do.
        """
        for place, each in self._inputs:
            each.receive(values[place])
        key = outputs.key, results
        if key in self._graphs:
            graph = self._graphs[key]
        else:
            if len(self._graphs) == _MAX_GRAPHS:
                self._graphs.popitem(last=False)
            graph = self._graphs[key] = self._captured(numbers, outputs, results)
        if graph is not None:
            graph.launch(self._device.stream)
        for _, each in self._inputs:
            each.launched(self._device.stream)
        return graph

    def _captured(self, numbers: Mapping[str, int], outputs: OutputSet, results: Results | None) -> Any:
        pointers = list(self._pointers)
        for name, tensor in outputs.tensors.items():
            pointers[numbers[name]] = tensor.data.pointer

        def ask() -> None:
            stream = self._device.second_stream
            ask_all([each.conversion for _, each in self._inputs if each.conversion], stream, self._overflow)
            self._plan.ask(pointers, False)
            if results is not None:
                results.ask(stream, self._overflow)

        return self._device.captured(ask)
