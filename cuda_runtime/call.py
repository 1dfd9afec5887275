"""A run as it is for inputs of one form: what to copy, and the graphs that do the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from cuda_runtime.backend import CUDABackend
from cuda_runtime.conversion import Conversion, ask_all
from cuda_runtime.device import CUDABuffer, VisibleBuffer
from cuda_runtime.inputs import Input, Overflow, staging_memory
from cuda_runtime.output_ring import OutputSet
from cuda_runtime.plan import CUDAPlan
from npu_compiler.dtypes import DType
from npu_compiler.tensor.layout import BufferSpec, dense

__all__ = ["Call", "Results"]

_MAX_GRAPHS = 8


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
        return {name: found[name] for name in self._names} if self._large else found


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
