"""Memory of an executor's own for calls from arrays to arrays: the host writes and reads it where it lies."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from npu_compiler.dtypes import DType
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device

__all__ = ["OwnMemory"]

_MOST_BYTES = 1 << 20  # of a tensor; a larger one takes memory for each call, which then costs next to nothing of it


class _Tensor:
    """A tensor of the executor's own, as the device has it and as the host sees the same memory."""

    def __init__(self, device: Device, spec: BufferSpec) -> None:
        data = device.backend.allocate_visible(spec.nbytes)
        with data.writing() as memory:
            memory[:] = 0  # what pads it stays so
            self.view: NDArray[Any] = spec.layout.view(memory[: spec.nbytes].view(spec.dtype.numpy))
        self.buffer = NPUBuffer(device, data, spec)


class OwnMemory:
    """The small tensors among an executor's inputs and outputs; each takes its memory when it is first asked for.

    One call at a time may use it.
    """

    def __init__(self, device: Device, inputs: Iterable[BufferSpec], outputs: Iterable[BufferSpec]) -> None:
        """Args:
        device: Where it lies.
        inputs, outputs: Those that are not updated in place.
        """
        self._device, self._transfers = device, device.backend.transfers
        self._inputs = {spec.name: spec for spec in inputs if spec.nbytes <= _MOST_BYTES}
        self._outputs = {spec.name: spec for spec in outputs if spec.nbytes <= _MOST_BYTES}
        self._received: dict[str, _Tensor] = {}
        self._made: dict[str, _Tensor] = {}

    def takes(self, name: str) -> bool:
        """Whether an input of this name is one of them."""
        return name in self._inputs

    def receive(self, name: str, array: NDArray[Any]) -> NPUBuffer:
        """Writes an input, and gives the buffer that it is in.

        Raises:
            InputError: The array does not fit.
            OutOfMemoryError: The device has too little memory.
        """
        spec = self._inputs[name]
        tensor = self._received.get(name)
        if tensor is None:
            tensor = self._received[name] = _Tensor(self._device, spec)
        started = perf_counter()
        spec.check(array)
        spec.store(array, tensor.view)
        self._transfers.uploads.add(tensor.buffer.data.nbytes, perf_counter() - started)
        return tensor.buffer

    def output(self, name: str) -> NPUBuffer | None:
        """The buffer that an output goes to; None where it is not one of them. Raises as `receive`."""
        if name not in self._made:
            if name not in self._outputs:
                return None
            self._made[name] = _Tensor(self._device, self._outputs[name])
        return self._made[name].buffer

    def array(self, name: str, kind: DType) -> NDArray[Any]:
        """What lies in an output, as a new array of a data type."""
        started = perf_counter()
        tensor = self._made[name]
        array = tensor.view.astype(kind.numpy, order="C")
        self._transfers.downloads.add(tensor.buffer.data.nbytes, perf_counter() - started)
        return array
