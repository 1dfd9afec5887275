"""Plans captured behind one another as one graph, which the host launches without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDABuffer, CUDADevice
from cuda_runtime.plan import CUDAPlan
from npu_runtime.backend import BoundPlan, Launched, Recording

__all__ = ["CUDARecording"]


class CUDARecording(Recording):
    """One graph of all steps of several plans."""

    def __init__(self, device: CUDADevice, bound: Sequence[BoundPlan]) -> None:
        """Captures them.

        Raises:
            DeviceError: The device refused a step.
        """
        super().__init__(bound)  # keeps the memory
        self._device = device
        self._plans = [cast(CUDAPlan, each.plan) for each in bound]
        self._graph = device.captured(self._ask)

    def _ask(self) -> None:
        behind_kernel = False
        for bound, plan in zip(self._bound, self._plans, strict=True):
            pointers = [cast(CUDABuffer, buffer).pointer for buffer in bound.buffers]
            behind_kernel = plan.ask(pointers, behind_kernel)

    def launch(self) -> Launched:
        with self._device.current():
            self._graph.launch(self._device.stream)
            done = cupy().cuda.Event(disable_timing=True)
            done.record(self._device.stream)
        return _Launched(self._device, self._bound, done)

    def replay(self, *, sync: bool, stream: Any) -> None:
        device = self._device
        with device.current():
            if stream is not None:
                device.order(stream, device.stream)
            self._graph.launch(device.stream)
            if stream is not None:
                device.order(device.stream, stream)
            elif sync:
                self._plans[-1].wait()
                for bound in self._bound:
                    bound.look()


class _Launched(Launched):
    def __init__(self, device: CUDADevice, bound: Sequence[BoundPlan], done: Any) -> None:
        self._device, self._bound, self._done = device, bound, done

    def __call__(self) -> None:
        with self._device.active():
            self._done.synchronize()
        for bound in self._bound:
            bound.look(finished=False)

    def is_done(self) -> bool:
        with self._device.current():
            return bool(self._done.done)
