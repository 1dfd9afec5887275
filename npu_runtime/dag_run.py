"""One run of a partitioned model: where each tensor is, and what crosses between host and device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from npu_compiler.dtypes import dtype
from npu_compiler.errors import InputError, IRError
from npu_compiler.graph.ir import TensorSpec
from npu_compiler.partitioner import Partition, PartitionPlan
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.buffer import NPUBuffer
from npu_runtime.device import Device
from npu_runtime.executor import Executor
from npu_runtime.host_tensors import as_array, is_array
from npu_runtime.weight_loader import Weights

if TYPE_CHECKING:
    import torch

    from npu_runtime.cpu_fallback import CPUProgram

__all__ = ["DAGRun", "HostTensor", "Lifetimes"]

Array = NDArray[Any]
HostTensor: TypeAlias = "Array | torch.Tensor"


@dataclass(frozen=True)
class Lifetimes:
    """How long a run keeps each tensor.

    Attributes:
        last_read: The last partition that reads a tensor, by name.
        last_device_read: The last partition on the device that does.
        read_by_cpu: Tensors that a partition on the CPU reads.
        downloads: Tensors that cross to the host once a partition has run, by its index.
    """

    last_read: Mapping[str, int]
    last_device_read: Mapping[str, int]
    read_by_cpu: frozenset[str]
    downloads: Mapping[int, tuple[str, ...]]

    @classmethod
    def of(cls, plan: PartitionPlan) -> Lifetimes:
        downloads: dict[int, tuple[str, ...]] = {}
        for transfer in plan.transfers:
            if transfer.direction == "to_cpu" and transfer.source is not None:
                downloads[transfer.source] = (*downloads.get(transfer.source, ()), transfer.tensor)
        return cls(
            last_read={name: part.index for part in plan.partitions for name in part.inputs},
            last_device_read={name: p.index for p in plan.partitions if p.on_device for name in p.inputs},
            read_by_cpu=frozenset(name for p in plan.partitions if not p.on_device for name in p.inputs),
            downloads=downloads,
        )


class DAGRun:
    """The tensors of one run.

    A tensor is on the host, as an array or as PyTorch's tensor, on the device, or on both; on the device also in two
    layouts, where two programs lay it out differently.
    """

    def __init__(
        self, plan: PartitionPlan, lifetimes: Lifetimes, device: Device, returned_weights: Mapping[str, Array]
    ) -> None:
        self._plan, self._lifetimes, self._device = plan, lifetimes, device
        self._host: dict[str, HostTensor] = dict(returned_weights)
        self._buffers: dict[str, list[NPUBuffer]] = {}
        self._resident: set[str] = set()  # what the caller keeps on the device
        self._inputs = frozenset(spec.name for spec in plan.inputs)
        self._outputs = frozenset(plan.output_tensors)

    def take(self, inputs: Mapping[str, Any], specs: Mapping[str, BufferSpec]) -> None:
        """Takes the caller's inputs; `specs` has those that the device reads.

        Raises:
            InputError: An input is missing, not expected, or not what the model declares.
        """
        declared = {spec.name: spec for spec in self._plan.inputs}
        if inputs.keys() != declared.keys():
            missing, unknown = declared.keys() - inputs.keys(), inputs.keys() - declared.keys()
            raise InputError(
                f"given the inputs {_names(inputs)}, expected {_names(declared)}"
                + (f"; missing: {_names(missing)}" if missing else "")
                + (f"; not expected: {_names(unknown)}" if unknown else "")
            )
        for name, value in inputs.items():
            if not isinstance(value, NPUBuffer):
                self._host[name] = _checked_array(value, declared[name])
                continue
            self._check_buffer(value, declared[name], specs.get(name))
            self._buffers[name] = [value]
            self._resident.add(name)
            if name in self._lifetimes.read_by_cpu:  # now, because a program may update it later
                self._host[name] = value.to_numpy()

    def on_device(self, part: Partition, executor: Executor, weights: Weights | None) -> None:
        """Runs a partition on the device, and fetches what the host needs of it."""
        given = {spec.name: self._buffer(spec) for spec in executor.plan.inputs}
        for output, source in executor.plan.state:
            if self._is_needed_after(source, part.index):
                given[source] = NPUBuffer.from_numpy(given[source].to_numpy(), self._device, given[source].spec)
            else:
                del self._buffers[source]
            if source in self._resident:
                self._resident.add(output)
        self._buffers.update({name: [buffer] for name, buffer in executor.run(given, weights).items()})
        for name in self._lifetimes.downloads.get(part.index, ()):
            if name not in self._resident or name in self._lifetimes.read_by_cpu:
                self._host[name] = self._buffers[name][0].to_numpy()
        self._forget(part)

    def on_cpu(self, part: Partition, program: CPUProgram) -> None:
        """Runs a partition on the CPU."""
        self._host.update(program.run(self._host))
        self._forget(part)

    def results(self) -> dict[str, Array | NPUBuffer]:
        """The model's outputs by the names it declares."""
        found: dict[str, Array | NPUBuffer] = {}
        for spec, name in zip(self._plan.outputs, self._plan.output_tensors, strict=True):
            if name in self._resident:
                found[spec.name] = self._buffers[name][0]
            else:
                found[spec.name] = np.asarray(as_array(self._host[name]), dtype=spec.dtype.numpy, order="C")
        return found

    def _buffer(self, spec: BufferSpec) -> NPUBuffer:
        """The tensor on the device as `spec` has it; uploaded, or laid out anew, where it is not there yet."""
        present = self._buffers.setdefault(spec.name, [])
        fitting = next((buffer for buffer in present if buffer.fits(spec)), None)
        if fitting is None:
            source = present[0].to_numpy() if present else as_array(self._host[spec.name])
            if spec.name not in self._inputs and spec.dtype.is_float:
                # What the CPU made is stored as the device would store it: the lowest float32 of a mask becomes -inf.
                with np.errstate(over="ignore"):
                    source = source.astype(spec.dtype.numpy, copy=False)
            fitting = NPUBuffer.from_numpy(source, self._device, spec)
            present.append(fitting)
        return fitting

    def _is_needed_after(self, name: str, index: int) -> bool:
        """Whether the device's copy of a tensor is read once a partition has run."""
        return self._lifetimes.last_device_read[name] > index or (name in self._outputs and name in self._resident)

    def _forget(self, part: Partition) -> None:
        """Frees what no later partition and no output needs."""
        for name in (*part.inputs, *part.outputs):
            if self._lifetimes.last_device_read.get(name, -1) <= part.index and not self._is_result(name):
                self._buffers.pop(name, None)
            if self._lifetimes.last_read.get(name, -1) <= part.index and name not in self._outputs:
                self._host.pop(name, None)

    def _is_result(self, name: str) -> bool:
        return name in self._outputs and name in self._resident

    def _check_buffer(self, buffer: NPUBuffer, declared: TensorSpec, spec: BufferSpec | None) -> None:
        if buffer.device.backend is not self._device.backend:
            raise InputError(
                f"input '{declared.name}': given a buffer on {buffer.device!r}, expected one on {self._device!r}"
            )
        if spec is not None and not buffer.fits(spec):
            raise InputError(
                f"input '{declared.name}': given {buffer!r}, expected {spec.dtype} {spec.shape} laid out as the device "
                f"wants it; make it by NPUBuffer.from_numpy(array, device, spec=dag.input_specs['{declared.name}'])"
            )
        if spec is None:
            _check(buffer.shape, buffer.dtype.name, declared)


def _checked_array(value: object, declared: TensorSpec) -> Array:
    if not is_array(value):
        raise InputError(
            f"input '{declared.name}': given a {type(value).__name__}, expected an array, a tensor or an NPUBuffer"
        )
    array = as_array(value, f"input '{declared.name}'")
    _check(array.shape, array.dtype.name, declared)
    return array


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


def _names(names: object) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"  # type: ignore[call-overload]
