"""Tensors in device memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import DType, dtype
from npu_compiler.errors import InputError, IRError
from npu_compiler.layout import BufferSpec, Layout, dense
from npu_runtime.backend import DeviceBuffer
from npu_runtime.device import Device

__all__ = ["NPUBuffer"]


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
    def from_numpy(cls, array: NDArray[Any], device: Device, spec: BufferSpec | None = None) -> NPUBuffer:
        """Copies a host array to the device.

        Args:
            array: Of shape `spec.shape`. A floating-point array is converted to the spec's dtype; what is too large for
                that becomes infinite, and numpy warns of it.
            device: Where to put it.
            spec: How it lies there, such as ``program.input_specs[0]``; dense and in the array's dtype when omitted.

        Raises:
            InputError: Not a numpy array, or one that does not fit `spec`.
            OutOfMemoryError: The device has not that much memory.
        """
        if not isinstance(array, np.ndarray):
            raise InputError(f"given a {type(array).__name__}, expected a numpy array; tensor.numpy() makes one")
        if spec is None:
            spec = _dense_spec(array.shape, array.dtype)
        return cls(device, device.backend.upload(array, spec), spec)

    @classmethod
    def zeros(
        cls,
        shape: tuple[int, ...],
        device: Device,
        alloc_shape: tuple[int, ...] | None = None,
        dtype: str | DType = "float16",
    ) -> NPUBuffer:
        """A row-major tensor of zeros.

        Args:
            shape: Logical shape.
            device: Where to put it.
            alloc_shape: Shape with padding; `shape` when omitted.
            dtype: Data type in device memory.

        Raises:
            InputError: `alloc_shape` cannot hold `shape`, or there is no such dtype.
            OutOfMemoryError: The device has not that much memory.
        """
        padded = tuple(alloc_shape) if alloc_shape is not None else tuple(shape)
        if len(padded) != len(shape) or any(not 0 <= n <= limit for n, limit in zip(shape, padded, strict=True)):
            raise InputError(f"given shape {tuple(shape)} and alloc_shape {padded}, expected one that holds the other")
        spec = _dense_spec(shape, dtype)
        spec = BufferSpec(spec.name, spec.dtype, spec.host_dtype, Layout(spec.shape, padded, spec.layout.order))
        data = device.backend.allocate(spec.nbytes)
        device.backend.clear(data)
        return cls(device, data, spec)

    def to_numpy(self, spec: BufferSpec | None = None) -> NDArray[Any]:
        """Copies the tensor to the host, without its padding.

        Args:
            spec: How to read the memory, such as ``program.output_specs[0]``; the buffer's own spec when omitted.

        Returns:
            An array of shape `spec.shape` and dtype `spec.host_dtype`.

        Raises:
            InputError: `spec` describes another tensor than the buffer holds.
        """
        if spec is not None and not self.fits(spec):
            raise InputError(
                f"the buffer holds {self.dtype} {self.shape} in {self.nbytes} bytes, the given spec '{spec.name}' "
                f"is {spec.dtype} {spec.shape} in {spec.nbytes} bytes; to_numpy() without spec reads it as it is"
            )
        return self.device.backend.download(self.data, spec or self.spec)

    def fits(self, spec: BufferSpec) -> bool:
        """Whether each element lies where `spec` expects it, in the dtype that it expects."""
        own, other = self.spec.layout, spec.layout
        if (self.dtype, self.shape, self.nbytes) != (spec.dtype, spec.shape, spec.nbytes):
            return False
        # The stride of a dimension of one element places nothing.
        pairs = zip(own.shape, own.strides, other.strides, strict=True)
        return all(extent <= 1 or stride == expected for extent, stride, expected in pairs)


def _dense_spec(shape: tuple[int, ...], kind: object) -> BufferSpec:
    try:
        found = dtype(kind)
    except IRError as error:
        raise InputError(f"no device holds such a tensor: {error}") from None
    return BufferSpec("", found, found, dense(tuple(shape)))
