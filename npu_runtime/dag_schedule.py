"""What a run of a partitioned model does, step by step: decided once for each way in which inputs are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from npu_compiler.dtypes import DType, dtype
from npu_compiler.partitioning.plan import Partition, PartitionPlan
from npu_compiler.tensor.layout import BufferSpec
from npu_runtime.executor import Executor

if TYPE_CHECKING:
    from npu_runtime.cpu_fallback import CPUProgram

__all__ = ["CPUStep", "Copy", "DeviceStep", "Form", "Key", "Relayout", "Result", "Schedule", "types_on_host"]

Key: TypeAlias = str | tuple[str, int]  # of a tensor on the device: its name, with a number in a further layout

_SMALL = 1 << 16  # elements of a tensor that the device converts to what the host reads
_SENT_AGAIN = 1 << 14  # bytes of a tensor that crosses with each partition that reads it, rather than by itself


class Form(NamedTuple):
    """How the inputs are given, and where the outputs shall be.

    Attributes:
        buffers: Inputs that are `NPUBuffer`s.
        tensors: Inputs that are other libraries' tensors on a device, and that partitions on the device read.
        on_device: Whether outputs that the device makes stay there.
    """

    buffers: frozenset[str]
    tensors: frozenset[str]
    on_device: bool


class Relayout(NamedTuple):
    """A tensor on the device that another program lays out differently: the keys of both, and how it is then."""

    source: Key
    key: Key
    spec: BufferSpec


class Copy(NamedTuple):
    """A state that is updated in a copy, because its old value is still read, or because it is the caller's tensor.

    Attributes:
        input: The executor's input that takes the copy.
        key: Of what is copied.
        spec: How the device reads it; None where it is a tensor of another library.
    """

    input: str
    key: Key
    spec: BufferSpec | None


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A partition on the device.

    Attributes:
        executor: What runs it.
        index: Of the partition.
        uploads: Tensors that cross before it runs, and stay.
        relayouts: Tensors that are laid out anew, and stay.
        given: The executor's inputs that are on the device, with their keys there.
        sent: Those that it takes from the host itself.
        copies: States that it updates in a copy.
        fetched: Which of its outputs the host reads.
        kept: Which of them stay on the device.
        host_ends, device_ends: What nobody reads once it has run.
    """

    executor: Executor
    index: int
    uploads: tuple[str, ...]
    relayouts: tuple[Relayout, ...]
    given: tuple[tuple[str, Key], ...]
    sent: tuple[str, ...]
    copies: tuple[Copy, ...]
    fetched: tuple[str, ...]
    kept: tuple[str, ...]
    host_ends: tuple[str, ...]
    device_ends: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class CPUStep:
    """A partition on the CPU, its index, and what nobody reads once it has run."""

    program: CPUProgram
    index: int
    host_ends: tuple[str, ...]
    device_ends: tuple[Key, ...]


class Result(NamedTuple):
    """An output: its name, the tensor that it is, whether it stays on the device, and its data type on the host."""

    name: str
    tensor: str
    on_device: bool
    dtype: np.dtype[Any]


def types_on_host(plan: PartitionPlan) -> dict[str, DType]:
    """The data types of small tensors where all that reads them on the host wants the same, by the tensors' names.

    Large ones cross as the device stores them, and are converted there by all processors.
    """
    read: dict[str, set[DType]] = {}
    small = set()
    for part in plan.partitions:
        if not part.on_device:
            for spec in part.ir["graph_inputs"]:
                read.setdefault(spec["name"], set()).add(dtype(spec["dtype"]))
                if prod(spec["shape"]) <= _SMALL:
                    small.add(spec["name"])
    for output, name in zip(plan.outputs, plan.output_tensors, strict=True):
        read.setdefault(name, set()).add(output.dtype)
    return {name: next(iter(types)) for name, types in read.items() if name in small and len(types) == 1}


class Schedule:
    """All steps for one form of the inputs.

    Attributes:
        given_there: Inputs that are on a device.
        fetched: Those that the host reads, at the beginning, because a program may update them later.
        steps: What runs, in order.
        results: The outputs.
        kept: Names of the outputs that take the place of states given as buffers, or are such inputs.
    """

    def __init__(
        self,
        plan: PartitionPlan,
        executors: Mapping[int, Executor],
        cpu_programs: Mapping[int, CPUProgram],
        input_specs: Mapping[str, BufferSpec],
        form: Form,
    ) -> None:
        """Args:
        plan: What to run.
        executors, cpu_programs: Its partitions by index, ready to run.
        input_specs: For each input that the device reads, how it lies there.
        form: How the inputs are given.
        """
        self._plan, self._form = plan, form
        self._outputs = frozenset(plan.output_tensors)
        self._resident = set(form.buffers)  # what the caller keeps on the device
        self._last_read = {name: part.index for part in plan.partitions for name in part.inputs}
        self._last_device_read = {name: p.index for p in plan.partitions if p.on_device for name in p.inputs}
        self._made_on_device = {name for part in plan.partitions if part.on_device for name in part.outputs}
        self._read_by_cpu = {name for part in plan.partitions if not part.on_device for name in part.inputs}
        # Where each tensor is on the device: its keys, and how it lies there; None where any reader can take it.
        self._places: dict[str, list[tuple[Key, BufferSpec | None]]] = {
            name: [(name, None if name in form.tensors else input_specs.get(name))]
            for name in (*form.buffers, *form.tensors)
        }
        self._keys: dict[str, list[Key]] = {name: [name] for name in self._places}
        self.given_there = tuple(self._places)
        self.fetched = tuple(
            [name for name in form.buffers if name in self._read_by_cpu]
            + [name for name in form.tensors if name in self._read_by_cpu | self._outputs]
        )
        self.steps = tuple(
            self._device_step(part, executors[part.index])
            if part.on_device
            else CPUStep(cpu_programs[part.index], part.index, *self._ends(part))
            for part in plan.partitions
        )
        self.results = tuple(
            Result(spec.name, name, self._stays(name), spec.dtype.numpy)
            for spec, name in zip(plan.outputs, plan.output_tensors, strict=True)
        )
        self.kept = frozenset(result.name for result in self.results if result.tensor in self._resident)

    def _device_step(self, part: Partition, executor: Executor) -> DeviceStep:
        uploads, relayouts, given, sent = self._read(part, executor)
        copies = self._updated(part, executor, given)
        for output in executor.plan.outputs:
            self._places[output.name] = [(output.name, output)]
            self._keys[output.name] = [output.name]
        fetched = tuple(
            transfer.tensor
            for transfer in self._plan.transfers
            if transfer.direction == "to_cpu" and transfer.source == part.index and self._crosses(transfer.tensor)
        )
        kept = tuple(output.name for output in executor.plan.outputs if self._is_needed_after(output.name, part))
        return DeviceStep(
            executor,
            part.index,
            tuple(uploads),
            tuple(relayouts),
            tuple(given.items()),
            tuple(sent),
            copies,
            fetched,
            kept,
            *self._ends(part),
        )

    def _read(self, part: Partition, executor: Executor) -> tuple[list[str], list[Relayout], dict[str, Key], list[str]]:
        """How a partition on the device comes by its inputs, as in `DeviceStep`."""
        uploads: list[str] = []
        relayouts: list[Relayout] = []
        given: dict[str, Key] = {}
        sent: list[str] = []
        for spec in executor.plan.inputs:
            name = spec.name
            places = self._places.setdefault(name, [])
            key = next((key for key, known in places if known is None or known.places_as(spec)), None)
            if key is not None:
                given[name] = key
                continue
            if not places and (self._last_device_read[name] == part.index or spec.nbytes <= _SENT_AGAIN):
                sent.append(name)
                continue
            if places:
                given[name] = name, len(places)
                relayouts.append(Relayout(places[0][0], given[name], spec))
            else:
                given[name] = name
                uploads.append(name)
            places.append((given[name], spec))
            self._keys.setdefault(name, []).append(given[name])
        return uploads, relayouts, given, sent

    def _updated(self, part: Partition, executor: Executor, given: dict[str, Key]) -> tuple[Copy, ...]:
        """The states that a partition must not update where they lie; they are taken out of `given`."""
        copies = []
        specs = {spec.name: spec for spec in executor.plan.inputs}
        for output, source in executor.plan.state:
            if source not in given:
                continue  # an array, which the executor uploads for itself
            if source in self._form.tensors:
                copies.append(Copy(source, given.pop(source), None))
            elif self._is_needed_after(source, part):
                copies.append(Copy(source, given.pop(source), specs[source]))
            else:
                self._places[source] = []
            if source in self._resident:
                self._resident.add(output)
        return tuple(copies)

    def _is_needed_after(self, name: str, part: Partition) -> bool:
        """Whether the device's copy of a tensor is read once a partition has run."""
        return self._last_device_read.get(name, -1) > part.index or self._stays(name)

    def _stays(self, name: str) -> bool:
        """Whether a tensor is an output that stays on the device."""
        stays = name in self._resident or (self._form.on_device and name in self._made_on_device)
        return stays and name in self._outputs

    def _crosses(self, name: str) -> bool:
        """Whether the host reads what the device made."""
        return name in self._read_by_cpu or not self._stays(name)

    def _ends(self, part: Partition) -> tuple[tuple[str, ...], tuple[Key, ...]]:
        """What no later partition and no output needs, on the host and on the device."""
        names = (*part.inputs, *part.outputs)
        on_host = (n for n in names if self._last_read.get(n, -1) <= part.index and n not in self._outputs)
        on_device = (key for n in names if not self._is_needed_after(n, part) for key in self._keys.get(n, ()))
        return tuple(on_host), tuple(on_device)
