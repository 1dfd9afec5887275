"""A CUDA device that only pretends: CuPy's names on memory of the host, streams as threads, conversions in numpy.

What is tested on it is what the host does, and when; the plan's own steps are whatever a test says.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuda_runtime import conversion
from cuda_runtime.backend import CUDABackend
from cuda_runtime.cupy_api import cupy
from npu_compiler.artifact.plan import ExecutionPlan, Role
from npu_runtime.backend import PreparedPlan

__all__ = ["PretendedBackend", "at", "pretended_cupy"]

_C_TYPES = {stored: name for name, (stored, _) in conversion._STORED.items() if name != "bool"}
_streams: dict[int, _Stream] = {}
_numbers = itertools.count(1)


def at(address: int, count: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Numbers that lie at an address."""
    kind = np.dtype(dtype)
    return np.frombuffer((ctypes.c_ubyte * (count * kind.itemsize)).from_address(address), kind)


class _Error(Exception):
    status = 719


class _Array(np.ndarray[Any, Any]):
    """As CuPy's, in memory of the host."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, mem=self.base)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=0)


class _Stream:
    """A thread that does one thing after another; what is asked of it while it captures becomes a graph."""

    def __init__(self, non_blocking: bool = True) -> None:
        self.ptr = next(_numbers)
        _streams[self.ptr] = self
        self._captured: list[Callable[[], object]] | None = None
        self._queue: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._queue.get()()

    def ask(self, work: Callable[[], object]) -> None:
        if self._captured is None:
            self._queue.put(work)
        else:
            self._captured.append(work)

    def begin_capture(self) -> None:
        self._captured = []

    def end_capture(self) -> Any:
        works, self._captured = self._captured or [], None
        return SimpleNamespace(launch=lambda stream: [stream.ask(work) for work in works])

    def synchronize(self) -> None:
        done = threading.Event()
        self.ask(done.set)
        if not done.wait(20):
            raise _Error("the pretended device hangs")

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Event:
    def __init__(self, **_: object) -> None:
        self._reached = threading.Event()
        self._reached.set()
        self.ptr = 0

    def record(self, stream: _Stream) -> None:
        self._reached = threading.Event()
        stream.ask(self._reached.set)

    def synchronize(self) -> None:
        self._reached.wait(20)

    @property
    def done(self) -> bool:
        return self._reached.is_set()


class _Device:
    compute_capability = "90"
    attributes: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, ordinal: int = 0) -> None: ...

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Kernel:
    """A kernel of conversions; its text says from what to what."""

    def __init__(self, _: int, text: str, entry: str) -> None:
        self.kinds = [_C_TYPES[kind] for kind in re.findall(r"typedef (.*) (?:Source|Target);", text)]
        self.notes_infinity = "NOTES_INFINITY 1" in text

    def launch(self, *given: Any) -> None:
        *_, values, params, stream, _ = given
        _streams[stream].ask(partial(self._convert, values, params))

    def _convert(self, values: Sequence[int], params: bytes) -> None:
        for tensor in struct.iter_unpack(conversion._LAYOUT, params):
            if tensor[2]:
                self._make(tensor, values[0])

    def _make(self, tensor: Sequence[int], lost: int) -> None:
        source, target, count, *rest = tensor
        most, rank = conversion._MOST_DIMENSIONS, rest[-1]
        places = np.unravel_index(np.arange(count), rest[2 * most : 2 * most + rank])
        reads, writes = (
            sum((n * stride for n, stride in zip(places, strides[:rank], strict=True)), np.zeros(count, int))
            for strides in (rest[:most], rest[most : 2 * most])
        )
        given = at(source, int(reads.max()) + 1, self.kinds[0])[reads]
        with np.errstate(over="ignore"):
            made = given.astype(self.kinds[1])
        at(target, int(writes.max()) + 1, self.kinds[1])[writes] = made
        if made.dtype.kind == "f" and (np.isinf(made) & (self.notes_infinity | np.isfinite(given))).any():
            at(lost, 1, np.uint32)[0] = 1


class _Plan(PreparedPlan):
    """A plan whose steps are what a test says: called with a tensor for each input and output, in order."""

    def __init__(self, device: PretendedBackend, plan: ExecutionPlan) -> None:
        self._device, self._plan = device, plan

    def ask(self, pointers: Sequence[int], _: bool) -> bool:
        tensors = []
        for role, specs in ((Role.INPUT, self._plan.inputs), (Role.OUTPUT, self._plan.outputs)):
            for spec in specs:
                number = [(each.role, each.name) for each in self._plan.buffers].index((role, spec.name))
                flat = at(pointers[number], spec.nbytes // spec.dtype.size, spec.dtype.numpy)
                tensors.append(spec.layout.view(flat))
        self._device.second_stream.ask(lambda: self._device.steps(*tensors))
        return True

    def wait(self) -> None:
        _streams[self._device.stream.ptr].synchronize()

    def run(self, buffers: Any) -> None:
        raise NotImplementedError

    def run_timed(self, buffers: Any) -> Any:
        raise NotImplementedError


class PretendedBackend(CUDABackend):
    """The backend on the pretended device.

    Attributes:
        steps: What a run does.
    """

    steps: Callable[..., object]

    def prepare(self, plan: ExecutionPlan) -> Any:
        return _Plan(self, plan)


def pretended_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts it in CuPy's place for a test."""

    def alloc_pinned_memory(nbytes: int) -> Any:
        memory = (ctypes.c_ubyte * nbytes)()
        memory.ptr = ctypes.addressof(memory)  # type: ignore[attr-defined]
        return memory

    def memcpy(target: int, source: int, nbytes: int, _: int, stream: int) -> None:
        _streams[stream].ask(lambda: ctypes.memmove(target, source, nbytes))

    def array(shape: tuple[int, ...], dtype: Any, place: Any) -> Any:
        return at(place, prod(shape) * np.dtype(dtype).itemsize, dtype).reshape(shape).view(_Array)

    runtime = SimpleNamespace(
        CUDARuntimeError=_Error,
        memcpyDefault=4,
        memcpyAsync=memcpy,
        driverGetVersion=lambda: 13000,
        getDeviceCount=lambda: 1,
        getDevice=lambda: 0,
        getDeviceProperties=lambda _: {"name": b"Pretended", "major": 9, "minor": 0},
        streamSynchronize=lambda stream: _streams[stream].synchronize(),
    )
    cuda: Any = ModuleType("cupy.cuda")
    cuda.runtime, cuda.alloc_pinned_memory = runtime, alloc_pinned_memory
    cuda.Stream, cuda.Event, cuda.Device = _Stream, _Event, _Device
    cuda.UnownedMemory, cuda.MemoryPointer = (lambda address, *_: address), (lambda address, start: address + start)
    cuda.memory = SimpleNamespace(OutOfMemoryError=MemoryError)
    module: Any = ModuleType("cupy")
    module.cuda, module.uint8, module.uint32, module.ndarray = cuda, np.uint8, np.uint32, array
    module.empty = lambda count, dtype: np.empty(count, dtype).view(_Array)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(conversion, "_kernel", _Kernel)
    cupy.cache_clear()
