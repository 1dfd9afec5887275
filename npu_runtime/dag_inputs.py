"""The inputs of a partitioned model: checked against what it declares, and told apart by where they lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from npu_compiler.dtypes import dtype
from npu_compiler.errors import InputError, IRError
from npu_compiler.ir import TensorSpec
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.buffer import NPUBuffer, is_device_tensor
from npu_runtime.call_checks import check_input_names
from npu_runtime.device import Device
from npu_runtime.host_tensors import as_array, described, is_array

__all__ = ["GivenInputs", "InputChecker"]


class GivenInputs(NamedTuple):
    """Checked inputs.

    Attributes:
        values: By name: arrays of the host, `NPUBuffer`s, and other libraries' tensors on a device.
        buffers: Names of the `NPUBuffer`s.
        tensors: Names of the tensors on a device.
    """

    values: dict[str, Any]
    buffers: frozenset[str]
    tensors: frozenset[str]


class InputChecker:
    """Checks the inputs of one plan."""

    def __init__(self, declared: tuple[TensorSpec, ...], specs: Mapping[str, BufferSpec], device: Device) -> None:
        """Args:
        declared: What the model takes.
        specs: Of those that the device reads, how they lie there.
        device: Where buffers have to be.
        """
        self._declared = {spec.name: spec for spec in declared}
        self._kinds = {spec.name: spec.dtype.numpy for spec in declared}
        self._specs, self._device = specs, device

    def taken(self, inputs: Mapping[str, Any]) -> GivenInputs:
        """The caller's inputs.

        Raises:
            InputError: An input is missing, not expected, or not what the model declares.
        """
        check_input_names(inputs, self._declared)
        values: dict[str, Any] = {}
        buffers, tensors = [], []
        for name, value in inputs.items():
            declared = self._declared[name]
            if isinstance(value, NPUBuffer):
                self._check_buffer(value, declared)
                buffers.append(name)
                values[name] = value
            elif name in self._specs and is_device_tensor(value):
                given = described(value)
                if given is not None:  # else whoever reads it finds out
                    _check(*given, declared)
                tensors.append(name)
                values[name] = value
            else:
                values[name] = self._array(value, declared)
        return GivenInputs(values, frozenset(buffers), frozenset(tensors))

    def _array(self, value: object, declared: TensorSpec) -> Any:
        if not is_array(value):
            raise InputError(
                f"input '{declared.name}': given a {type(value).__name__}, expected an array, a tensor or an NPUBuffer"
            )
        array = as_array(value, f"input '{declared.name}'")
        if array.shape != declared.shape or array.dtype != self._kinds[declared.name]:
            _check(array.shape, array.dtype.name, declared)
        return array

    def _check_buffer(self, buffer: NPUBuffer, declared: TensorSpec) -> None:
        spec = self._specs.get(declared.name)
        if buffer.device.backend is not self._device.backend:
            raise InputError(
                f"input '{declared.name}': given a buffer on {buffer.device!r}, expected one on {self._device!r}"
            )
        if spec is None:
            _check(buffer.shape, buffer.dtype.name, declared)
        elif not buffer.fits(spec):
            raise InputError(
                f"input '{declared.name}': given {buffer!r}, expected {spec.dtype} {spec.shape} laid out as the device "
                f"wants it; make it by NPUBuffer.from_numpy(array, device, spec=dag.input_specs['{declared.name}'])"
            )


def _check(shape: tuple[int, ...], kind: str, declared: TensorSpec) -> None:
    if tuple(shape) != declared.shape:
        raise InputError(
            f"input '{declared.name}': given the shape {tuple(shape)}, expected {declared.shape}; shapes are fixed "
            "when the model is extracted"
        )
    if kind == declared.dtype.name or (declared.dtype.is_float and _is_float(kind)):
        return
    raise InputError(
        f"input '{declared.name}': given the dtype {kind}, expected {declared.dtype}; convert it with "
        f"array.astype('{declared.dtype}') if that keeps its values"
    )


def _is_float(kind: str) -> bool:
    try:
        return dtype(kind).is_float
    except IRError:
        return False
