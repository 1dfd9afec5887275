"""Tensors on a CUDA device that other libraries can read and write without a copy."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from cuda_runtime.backend import CUDABackend
from cuda_runtime.conversion import Conversion
from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDABuffer
from npu_compiler.dtypes import BFLOAT16, DType
from npu_compiler.dtypes import dtype as data_type
from npu_compiler.errors import InputError, IRError
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.faults import FaultRecord, Runs
from npu_runtime.host_tensors import codes_of

__all__ = ["CUDATensor", "checked_array", "lies_as"]


class CUDATensor(NPUBuffer):
    """An `NPUBuffer` on a CUDA device: ``torch.from_dlpack(tensor)`` and ``cupy.asarray(tensor)`` share its memory."""

    data: CUDABuffer
    _faults: FaultRecord | None = None
    _runs: Runs

    def watch(self, faults: FaultRecord) -> None:
        """Says that a run makes it which is asked for next, and where the faults of that run are recorded."""
        self._faults, self._runs = faults, faults.runs

    def to_numpy(self, spec: BufferSpec | None = None, dtype: str | DType | None = None) -> NDArray[Any]:
        """As `NPUBuffer.to_numpy`; waits for the run that makes it.

        Raises:
            InputError: As `NPUBuffer.to_numpy`; or an index lay beyond its tensor in that run, or in another that was
                asked for since somebody waited.
        """
        array = super().to_numpy(spec, dtype)
        if self._faults is not None:
            self._runs.check()
            self._faults.look()
        return array

    @property
    def array(self) -> Any:
        """The tensor as a CuPy array of shape `shape`, in device memory's dtype, or of its codes; no copy."""
        return self.data.view(self.spec)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype == BFLOAT16:
            raise AttributeError("the CUDA array interface has no bfloat16; DLPack has: torch.from_dlpack(tensor)")
        interface: dict[str, Any] = dict(self.array.__cuda_array_interface__)
        return {**interface, "stream": self.data.device.stream.ptr}

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        with self.data.device.active():
            return self.array.__dlpack__(stream=stream, **options)

    def __dlpack_device__(self) -> tuple[Any, int]:
        device: tuple[Any, int] = self.array.__dlpack_device__()
        return device

    @classmethod
    def sharing(cls, value: Any, device: Device, spec: BufferSpec) -> CUDATensor | None:
        """A tensor of another library in its own memory; None where that lies otherwise than `spec` has it.

        Args, Raises: As for `adopt`.
        """
        backend = device.backend
        assert isinstance(backend, CUDABackend)
        array = checked_array(value, backend, spec)
        if not lies_as(array, spec):
            return None
        with backend.active():
            pointer = cupy().cuda.MemoryPointer(array.data.mem, array.data.ptr - array.data.mem.ptr)
            return cls(device, CUDABuffer(backend, cupy().ndarray((spec.nbytes,), cupy().uint8, pointer)), spec)

    @classmethod
    def adopt(cls, value: Any, device: Device, spec: BufferSpec, overflow: Any) -> CUDATensor:
        """A tensor of another library as an input; its memory is used as it is where dtype and strides allow.

        Args:
            value: Of shape `spec.shape`, with ``__dlpack__`` or ``__cuda_array_interface__``.
            device: The device that it must lie on.
            spec: What the program expects.
            overflow: What is set where a value is too large, as for `Conversion.ask`.

        Raises:
            InputError: It is not on this device, or does not fit `spec`.
        """
        shared = cls.sharing(value, device, spec)
        if shared is not None:
            return shared
        backend = device.backend
        assert isinstance(backend, CUDABackend)
        array = checked_array(value, backend, spec)
        with backend.active():
            made = cls(device, backend.allocate(spec.nbytes), spec)
            if spec.layout.is_padded:
                made.data.array[...] = 0
            Conversion(array, made.array).ask(backend.stream, overflow)
            return made


def checked_array(value: Any, backend: CUDABackend, spec: BufferSpec) -> Any:
    """A tensor of another library as a CuPy array, of the same memory; what makes it is waited for by the device.

    Args:
        value: As for `CUDATensor.adopt`.
        backend: The device that it must lie on.
        spec: What the program expects.

    Raises:
        InputError: It is not on this device, or has another shape or kind of data type.
    """
    with backend.active():
        codes = codes_of(value, spec.dtype)
        array = _as_cupy(value if codes is None else codes, spec)
        _check(array, backend, spec, spec.dtype if codes is None else spec.dtype.stored)
        return array


def lies_as(array: Any, spec: BufferSpec) -> bool:
    """Whether each element of a CuPy array lies where `spec` has it, in its data type."""
    strides = tuple(stride * spec.dtype.size for stride in spec.layout.strides)
    same = all(n == 1 or a == b for n, a, b in zip(spec.shape, array.strides, strides, strict=True))
    return same and str(array.dtype) == spec.dtype.stored.name


def _as_cupy(value: Any, spec: BufferSpec) -> Any:
    try:
        if hasattr(value, "__dlpack__"):
            return cupy().from_dlpack(value)
        return cupy().asarray(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"input '{spec.name}': given a {type(value).__name__} that is not in this device's memory ({error}); "
            "give a tensor on the device, or NPUBuffer.from_numpy(array, device, spec=spec)"
        ) from error


def _check(array: Any, backend: CUDABackend, spec: BufferSpec, expected: DType) -> None:
    if array.device.id != backend.ordinal:
        raise InputError(
            f"input '{spec.name}': given a tensor on cuda:{array.device.id}, expected one on cuda:{backend.ordinal}"
        )
    if tuple(array.shape) != spec.shape:
        raise InputError(f"input '{spec.name}': given shape {tuple(array.shape)}, expected {spec.shape}")
    try:
        given = data_type(array.dtype)
    except IRError as error:
        raise InputError(f"input '{spec.name}': {error}") from error
    narrowed = given.is_integer and given.size > expected.size  # what does not fit would wrap around
    if given.category != expected.category or narrowed:
        raise InputError(f"input '{spec.name}': given {given}, expected {spec.host_dtype}; convert it first")
