"""A run as it is for inputs of one form: what to copy, and the graphs that do the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cuda_runtime.backend import SMALL_BYTES, CUDABackend
from cuda_runtime.conversion import convert
from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDABuffer, VisibleBuffer
from cuda_runtime.output_ring import OutputSet
from cuda_runtime.plan import CUDAPlan
from cuda_runtime.tensor import checked_array
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime.buffer import NPUBuffer

__all__ = ["Call", "Copied", "FromHost", "Input", "InPlace", "Rearranged", "Results"]

_MAX_GRAPHS = 8

Overflow = Any  # a CuPy array on pinned memory, see `convert`


class Input(ABC):
    """How an input reaches the memory that the plan reads.

    Attributes:
        pointer: The address of that memory.
    """

    pointer: int

    def receive(self, value: Any) -> None:  # noqa: B027  # most have nothing to do
        """What happens at each run, before the graph."""

    def ask(self, stream: Any, overflow: Overflow) -> None:  # noqa: B027
        """What happens in the graph, before the plan; the stream is the current one."""

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
        self.pointer, self._target = memory.pointer, memory.view(spec)
        runtime = cupy().cuda
        place = runtime.UnownedMemory(source.data.ptr, _extent(source), None, source.device.id)
        pointer = runtime.MemoryPointer(place, 0)
        self._source = cupy().ndarray(source.shape, source.dtype, pointer, source.strides)

    def ask(self, stream: Any, overflow: Overflow) -> None:
        convert(self._source, self._target, stream, overflow)


class Copied(Input):
    """Copied, and converted where it must be, from wherever the caller has it."""

    def __init__(self, device: CUDABackend, memory: CUDABuffer, spec: BufferSpec) -> None:
        """Args:
        device: The device.
        memory: Where it goes.
        spec: What the plan reads.
        """
        self.pointer, self._device, self._spec = memory.pointer, device, spec
        self._target = memory.view(spec)

    def receive(self, value: Any) -> None:
        source = cast(CUDABuffer, value.data).view(self._spec) if isinstance(value, NPUBuffer) else None
        if source is None:
            source = checked_array(value, self._device, self._spec)
        with self._device.active():
            convert(source, self._target, self._device.stream, self._device.overflow.array)


class FromHost(Input):
    """Sent over the bus as it is on the host, and converted on the device."""

    def __init__(self, device: CUDABackend, memory: CUDABuffer, spec: BufferSpec, dtype: np.dtype[Any]) -> None:
        """Args:
        device: The device.
        memory: Where it goes.
        spec: What the plan reads.
        dtype: Of the caller's array, which has `spec.shape`.
        """
        self.pointer, self._target, self._device = memory.pointer, memory.view(spec), device
        nbytes = prod(spec.shape) * dtype.itemsize
        staged = staging_memory(device, nbytes)
        with device.active():
            self._source = staged.array[:nbytes].view(dtype).reshape(spec.shape)
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

    def ask(self, stream: Any, overflow: Overflow) -> None:
        convert(self._source, self._target, stream, overflow)


def staging_memory(device: CUDABackend, nbytes: int) -> CUDABuffer:
    """Memory for a tensor as the host has it: pinned for a small one, else on the device."""
    return device.allocate_visible(nbytes) if nbytes <= SMALL_BYTES else device.allocate(nbytes)


def _extent(array: Any) -> int:
    """Bytes from the first to the last element of an array whose strides are not negative."""
    return int(sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize)


class Results:
    """Outputs on their way to the host: converted on the device, and read when they are there."""

    def __init__(self, device: CUDABackend, tensors: Mapping[str, Any]) -> None:
        """Args:
        device: The device.
        tensors: The outputs, as `CUDATensor`.
        """
        self._device, self._names = device, list(tensors)
        self._pairs: list[tuple[Any, Any]] = []
        self._visible: dict[str, NDArray[Any]] = {}
        self._large: dict[str, tuple[CUDABuffer, BufferSpec]] = {}
        for name, tensor in tensors.items():
            spec = BufferSpec(name, tensor.spec.host_dtype, tensor.spec.host_dtype, dense(tensor.spec.shape))
            memory = staging_memory(device, spec.nbytes)
            if isinstance(memory, VisibleBuffer):
                self._visible[name] = memory.content.view(spec.dtype.numpy).reshape(spec.shape)
            else:
                self._large[name] = memory, spec
            self._pairs.append((tensor.array, memory.view(spec)))

    def ask(self, stream: Any, overflow: Overflow) -> None:
        """What happens in the graph, behind the plan."""
        for source, target in self._pairs:
            convert(source, target, stream, overflow)

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
        kept: object,
    ) -> None:
        """Args:
        device: The device.
        plan: The plan.
        pointers: The address of each of the plan's buffers; those of inputs and outputs are filled in.
        inputs: How inputs are taken: their places among the values, the numbers of their buffers, and the ways.
        kept: What must live as long as the call.
        """
        self._device, self._plan, self._kept = device, plan, kept
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
        key = outputs.key, results is not None
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

        def ask(overflow: Overflow, with_plan: bool) -> None:
            stream = self._device.second_stream
            with stream:
                for _, each in self._inputs:
                    each.ask(stream, overflow)
                if with_plan:
                    self._plan.ask(pointers, False)
                if results is not None:
                    results.ask(stream, overflow)

        with self._device.aside() as stream:
            # Once outside of the capture: a kernel that converts is compiled at its first use.
            self._device.stream.synchronize()
            ask(cupy().zeros(1, cupy().uint32), False)
            stream.synchronize()
        return self._device.captured(lambda: ask(self._device.overflow.array, True))
