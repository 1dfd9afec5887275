"""One run of a partitioned model: the tensors of it, on the host and on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from npu_runtime.buffer import NPUBuffer
from npu_runtime.dag_schedule import Copy, CPUStep, DeviceStep, Key, Schedule
from npu_runtime.device import Device
from npu_runtime.host_tensors import as_array, copied, rounded
from npu_runtime.weight_loader import Weights

if TYPE_CHECKING:
    import torch

__all__ = ["DAGRun", "HostTensor"]

Array = NDArray[Any]
HostTensor: TypeAlias = "Array | torch.Tensor"


class DAGRun:
    """The tensors of one run.

    A tensor is on the host, as an array or as PyTorch's tensor, on the device, or on both; on the device also in two
    layouts, where two programs lay it out differently. Where, the schedule knows.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: Device,
        inputs: Mapping[str, Any],
        returned_weights: Mapping[str, Array],
    ) -> None:
        """Args:
        schedule: What to do.
        device: Where the partitions for the device run.
        inputs: The caller's, checked: of the form that the schedule is for.
        returned_weights: Weights that are outputs as they are, by their names in the graph.
        """
        self._schedule, self._device = schedule, device
        host = {**inputs, **returned_weights}
        self._on_device: dict[Key, Any] = {}
        for name in schedule.given_there:
            self._on_device[name] = host.pop(name)
        self._host: dict[str, HostTensor] = host
        for name in schedule.fetched:
            self._host[name] = as_array(self._on_device[name], f"input '{name}'")

    def on_device(self, step: DeviceStep, weights: Weights | None) -> None:
        """Runs a partition on the device, and fetches what the host needs of it."""
        here, there = self._host, self._on_device
        if step.uploads:
            there.update(step.executor.upload({name: as_array(here[name]) for name in step.uploads}))
        for source, key, spec in step.relayouts:
            there[key] = NPUBuffer.from_numpy(rounded(there[source].to_numpy(), spec.dtype), self._device, spec)
        given = {name: there[key] for name, key in step.given}
        for name in step.sent:
            given[name] = as_array(self._host[name])
        for copy in step.copies:
            given[copy.input] = self._copied(copy)
        fetched, kept = step.executor.run_and_fetch(given, weights, step.fetched, step.kept)
        here.update(fetched)
        there.update(kept)
        self._forget(step)

    def on_cpu(self, step: CPUStep) -> None:
        """Runs a partition on the CPU."""
        self._host.update(step.program.run(self._host))
        self._forget(step)

    def results(self) -> dict[str, Array | NPUBuffer]:
        """The model's outputs by the names it declares."""
        found: dict[str, Array | NPUBuffer] = {}
        for name, tensor, on_device, kind in self._schedule.results:
            if on_device:
                found[name] = self._on_device[tensor]
            else:
                found[name] = np.asarray(as_array(self._host[tensor]), dtype=kind, order="C")
        return found

    def _copied(self, copy: Copy) -> Any:
        value = self._on_device[copy.key]
        if copy.spec is None:
            return copied(value)
        return NPUBuffer.from_numpy(value.to_numpy(), self._device, copy.spec)

    def _forget(self, step: DeviceStep | CPUStep) -> None:
        for name in step.host_ends:
            self._host.pop(name, None)
        for key in step.device_ends:
            self._on_device.pop(key, None)
