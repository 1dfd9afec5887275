"""Tensors in device memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from npu_compiler.dtypes import DType, dtype
from npu_compiler.errors import InputError, IRError
from npu_compiler.tensor.layout import BufferSpec, Layout, dense
from npu_runtime.backend import Backend, DeviceBuffer
from npu_runtime.device import Device
from npu_runtime.host_tensors import as_array, is_array, on_host

__all__ = ["NPUBuffer", "is_device_tensor", "is_host_array"]


class NPUBuffer:
    """A tensor on a device: memory, and the shape, dtype and layout of what lies in it.

    Attributes:
        device: Where it lies.
        data: The memory.
        spec: Shape, dtype and layout.
    """

    def __init__(self, device: Device, data: DeviceBuffer, spec: BufferSpec) -> None:
        self.device, self.data, self.spec = device, data, spec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def alloc_shape(self) -> tuple[int, ...]:
        """Shape with padding."""
        return self.spec.alloc_shape

    @property
    def dtype(self) -> DType:
        """Data type in device memory."""
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of device memory, padding included."""
        return self.spec.nbytes

    def __repr__(self) -> str:
        padded = f", padded to {self.alloc_shape}" if self.spec.layout.is_padded else ""
        return f"NPUBuffer({self.dtype} {self.shape}{padded} on {self.device.name})"

    @classmethod
    def from_numpy(
        cls,
        array: Any,
        device: Device | Backend | str | None = None,
        spec: BufferSpec | None = None,
        dtype: str | DType | None = None,
    ) -> NPUBuffer:
        """Copies a host array to the device.

        Args:
            array: Of shape `spec.shape`: a numpy array, a tensor of torch, or anything else that `__array__`, DLPack or
                the buffer protocol makes one. A floating-point array is converted to the spec's dtype.
            device: Where to put it, or its name; the best device of the machine when omitted.
            spec: How it lies there, such as ``program.input_specs[0]``; dense when omitted.
            dtype: Data type in device memory, where no `spec` says it; the array's own when omitted.

        Raises:
            InputError: Not an array, one that does not fit `spec`, or values that the device's dtype cannot hold.
            DeviceError: There is no such device.
            OutOfMemoryError: The device has not that much memory.
        """
        where, given = Device.of(device), as_array(array)
        if spec is None:
            spec = _dense_spec(given.shape, given.dtype if dtype is None else dtype)
            own = _dtype(given.dtype)
            if own.category > spec.dtype.category:
                raise InputError(f"given an array of {own} and dtype='{spec.dtype}'; round or compare it first")
            return cls(where, where.backend.upload(given, replace(spec, host_dtype=own)), spec)
        if not isinstance(spec, BufferSpec):
            raise InputError(f"given a {type(spec).__name__} as spec, expected one such as program.input_specs[0]")
        if dtype is not None and _dtype(dtype) != spec.dtype:
            raise InputError(f"given dtype={dtype!r} beside a spec of {spec.dtype}; give one of the two")
        return cls(where, where.backend.upload(given, spec), spec)

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, ...],
        device: Device | Backend | str | None = None,
        alloc_shape: tuple[int, ...] | None = None,
        dtype: str | DType = "float16",
    ) -> NPUBuffer:
        """A row-major tensor of zeros.

        Args:
            shape: Logical shape.
            device: Where to put it, or its name; the best device of the machine when omitted.
            alloc_shape: Shape with padding; `shape` when omitted.
            dtype: Data type in device memory.

        Raises:
            InputError: `alloc_shape` cannot hold `shape`, or there is no such dtype.
            DeviceError: There is no such device.
            OutOfMemoryError: The device has not that much memory.
        """
        shape = _sizes(shape)
        padded = _sizes(alloc_shape) if alloc_shape is not None else shape
        if len(padded) != len(shape) or any(not 0 <= n <= limit for n, limit in zip(shape, padded, strict=True)):
            raise InputError(f"given shape {tuple(shape)} and alloc_shape {padded}, expected one that holds the other")
        spec = _dense_spec(shape, dtype)
        spec = BufferSpec(spec.name, spec.dtype, spec.host_dtype, Layout(spec.shape, padded, spec.layout.order))
        where = Device.of(device)
        data = where.backend.allocate(spec.nbytes)
        where.backend.clear(data)
        return cls(where, data, spec)

    def to_numpy(self, spec: BufferSpec | None = None, dtype: str | DType | None = None) -> NDArray[Any]:
        """Copies the tensor to the host, without its padding.

        Args:
            spec: How to read the memory, such as ``program.output_specs[0]``; the buffer's own spec when omitted.
            dtype: Data type of the array; `spec.host_dtype` when omitted.

        Returns:
            An array of shape `spec.shape`.

        Raises:
            InputError: `spec` describes another tensor than the buffer holds.
        """
        if spec is not None and not isinstance(spec, BufferSpec):
            raise InputError(f"given a {type(spec).__name__} as spec, expected one such as program.output_specs[0]")
        if spec is not None and not self.fits(spec):
            raise InputError(
                f"the buffer holds {self.dtype} {self.shape} in {self.nbytes} bytes, the given spec '{spec.name}' "
                f"is {spec.dtype} {spec.shape} in {spec.nbytes} bytes; to_numpy() without spec reads it as it is"
            )
        spec = spec or self.spec
        if dtype is not None:
            spec = replace(spec, host_dtype=_dtype(dtype))
        return self.device.backend.download(self.data, spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """What numpy takes as ``numpy.asarray(buffer)``: a copy on the host."""
        if copy is False:
            raise ValueError("a buffer on a device becomes a host array by a copy only")
        array = self.to_numpy()
        return array if dtype is None else array.astype(dtype)

    def fits(self, spec: BufferSpec) -> bool:
        """Whether each element lies where `spec` expects it, in the dtype that it expects."""
        return self.spec.places_as(spec)


def is_host_array(value: object) -> bool:
    """Whether it is an array in the host's memory, and no buffer of a device that the host may read."""
    return not isinstance(value, NPUBuffer) and is_array(value) and on_host(value)


def is_device_tensor(value: object) -> bool:
    """Whether it is another library's tensor in a device's memory, and neither the host's nor a buffer."""
    names_memory = is_array(value) or hasattr(value, "__cuda_array_interface__")
    return not isinstance(value, NPUBuffer) and names_memory and not on_host(value)


def _dense_spec(shape: tuple[int, ...], kind: object) -> BufferSpec:
    found = _dtype(kind)
    return BufferSpec("", found, found, dense(tuple(shape)))


def _dtype(kind: object) -> DType:
    try:
        return dtype(kind)
    except IRError as error:
        raise InputError(f"no device holds such a tensor: {error}") from None


def _sizes(shape: object) -> tuple[int, ...]:
    """A shape as a tuple of ints; a lone number is a vector's length."""
    sizes = (shape,) if isinstance(shape, int) else shape
    if not isinstance(sizes, tuple | list) or not all(hasattr(size, "__index__") for size in sizes):
        raise InputError(f"given {shape!r:.60} as a shape, expected a tuple of sizes such as (1, 3, 224, 224)")
    return tuple(int(size) for size in sizes)
