"""What must not be freed while the device may still read it."""

from __future__ import annotations

from cuda_runtime.cupy_api import cupy
from cuda_runtime.device import CUDADevice

__all__ = ["InFlight"]

_GENERATION = 64  # runs


class InFlight:
    """Keeps what recent runs were given until they are over, without waiting at each of them."""

    def __init__(self, device: CUDADevice) -> None:
        self._stream = device.stream
        self._young: list[object] = []
        self._old: list[object] = []
        with device.active():
            self._behind_old = cupy().cuda.Event(disable_timing=True)

    def add(self, kept: object) -> None:
        """Keeps something for the run that was asked for last."""
        self._young.append(kept)
        if len(self._young) == _GENERATION:
            self._behind_old.synchronize()
            self._behind_old.record(self._stream)
            self._old, self._young = self._young, []

    def clear(self) -> None:
        """Lets go of everything: all runs are over."""
        self._young.clear()
        self._old.clear()
