"""Metal: Apple GPUs through pyobjc, and the software GPU, which has the same names. One implementation for both."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from metal_runtime.metal_api import MetalApi, apple_metal, software_metal
from metal_runtime.plan import MetalPlan
from npu_compiler.artifact.describe import format_bytes
from npu_compiler.artifact.plan import ExecutionPlan
from npu_compiler.errors import DeviceError, OutOfMemoryError
from npu_runtime.backend import Backend, DeviceBuffer, PreparedPlan, Transfers

__all__ = ["MetalBackend", "MetalBuffer"]


_APIS = {"metal": apple_metal, "software-metal": software_metal}


class MetalBuffer(DeviceBuffer):
    """An MTLBuffer in memory that device and host share."""

    part_bytes = 8 << 20  # any number would do; large tensors are cut for several threads

    def __init__(self, native: Any, nbytes: int) -> None:
        self.native, self.nbytes = native, nbytes

    @cached_property
    def _memory(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.native.contents().as_buffer(self.native.length()), np.uint8)[: self.nbytes]

    @contextmanager
    def writing(self) -> Iterator[NDArray[np.uint8]]:
        yield self._memory

    @contextmanager
    def writing_part(self, start: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        yield self._memory[start : start + nbytes]

    def reading(self) -> NDArray[np.uint8]:
        view = self._memory.view()
        view.flags.writeable = False
        return view


class MetalBackend(Backend):
    """A Metal device: the Apple GPU on macOS, the software GPU elsewhere."""

    target = "metal"

    def __init__(self, api: MetalApi | None = None) -> None:
        """Opens the device.

        Args:
            api: Which Metal to use; the machine's own when omitted.

        Raises:
            DeviceError: This machine has no such device.
        """
        self._api = api or _APIS["metal" if platform.system() == "Darwin" else "software-metal"]()
        self._queue = self._api.device.newCommandQueue()
        self._most_bytes = int(self._api.device.maxBufferLength())
        self.name = str(self._api.device.name())
        self.transfers = Transfers()

    @classmethod
    def open(cls, name: str, ordinal: int) -> Self:
        api = _APIS[name]()
        if ordinal:
            raise DeviceError(f"given the device '{name}:{ordinal}', this machine has one such device; use '{name}'")
        return cls(api)

    def allocate(self, nbytes: int) -> MetalBuffer:
        length = max(nbytes, 1)  # Metal has no empty buffers, a model may have empty tensors
        device, shared = self._api.device, self._api.module.MTLResourceStorageModeShared
        native = None
        if length <= self._most_bytes:
            with self._api.pool():
                native = device.newBufferWithLength_options_(length, shared)
        if native is None:
            limit = format_bytes(device.recommendedMaxWorkingSetSize())
            raise OutOfMemoryError(
                f"{self.name} could not allocate {format_bytes(nbytes)}; it works well with up to {limit} in all: "
                "free other programs or buffers, or use a smaller model"
            )
        return MetalBuffer(native, nbytes)

    def prepare(self, plan: ExecutionPlan) -> PreparedPlan:
        return MetalPlan(self._api, self._queue, plan)
