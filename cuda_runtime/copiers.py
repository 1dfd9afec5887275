"""Threads that copy memory of the host; one core alone copies a fifth of what the bus takes.

Threads of Python hand the interpreter's lock over after each copy, which takes as long as copying a few hundred KiB.
Where the process has imported PyTorch anyway, its threads copy, which need no lock.
"""

from __future__ import annotations

import ctypes
import os
import sys
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from functools import cache
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from numpy.typing import NDArray

__all__ = ["Copiers", "Copy", "by_torch", "copiers", "flat_tensor", "in_sections", "tensor_at"]

_MOST = 8  # threads, the one that asks among them


class Copy(NamedTuple):
    """A copy of bytes from one address to another, and what to do when it is made."""

    target: int
    source: int
    nbytes: int
    then: Callable[[], object] | None = None

    def make(self) -> None:
        """Copies; the interpreter's lock is left to others meanwhile."""
        ctypes.memmove(self.target, self.source, self.nbytes)
        if self.then is not None:
            self.then()

    def make_by_torch(self) -> None:
        """Copies by PyTorch's threads."""
        tensor_at(self.target, self.nbytes).copy_(tensor_at(self.source, self.nbytes))
        if self.then is not None:
            self.then()


def tensor_at(address: int, nbytes: int) -> Any:
    """Bytes at an address as a tensor of PyTorch, which has been imported."""
    torch = sys.modules["torch"]
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


def flat_tensor(array: NDArray[Any]) -> Any:
    """A contiguous array as a tensor of PyTorch with one dimension; to be read only."""
    torch = sys.modules["torch"]
    if array.flags.writeable:  # of others PyTorch warns
        return torch.from_numpy(array).view(-1)
    return tensor_at(array.ctypes.data, array.nbytes).view(getattr(torch, array.dtype.name))


def in_sections(target: int, source: int, nbytes: int, size: int) -> list[Copy]:
    """A copy as several of at most `size` bytes."""
    return [Copy(target + at, source + at, min(size, nbytes - at)) for at in range(0, nbytes, size)]


class _Work:
    """Copies that several threads share, each taking the next one."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = iter(copies)
        self._left = len(copies)
        self._failure: BaseException | None = None
        self._lock, self._done = allocate_lock(), allocate_lock()
        self._done.acquire()

    def take_part(self) -> None:
        """Makes copies until there is none left to take."""
        while (copy := next(self._copies, None)) is not None:  # taking one is a single step of the interpreter
            try:
                copy.make()
            except BaseException as error:
                self._failure = error
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._done.release()

    def finish(self) -> None:
        """Takes part, waits for the others, and raises what went wrong."""
        self.take_part()
        self._done.acquire()
        if self._failure is not None:
            raise self._failure


def by_torch() -> bool:
    """Whether each copy is made by all of PyTorch's threads, one copy after another."""
    return hasattr(sys.modules.get("torch"), "frombuffer")


class Copiers:
    """A few threads that wait for work.

    Attributes:
        count: How many copy at once, the thread that asks among them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._queue: SimpleQueue[Any] = SimpleQueue()
        for _ in range(count - 1):
            Thread(target=self._serve, name="npu-copier", daemon=True).start()

    def run(self, copies: Sequence[Copy]) -> None:
        """Makes copies, in any order; returns when all are made."""
        if by_torch():
            for copy in copies:
                copy.make_by_torch()
        elif len(copies) == 1:
            copies[0].make()
        elif copies:
            work = _Work(copies)
            for _ in range(min(self.count, len(copies)) - 1):
                self._queue.put(work)
            work.finish()

    def _serve(self) -> None:
        while True:
            self._queue.get().take_part()


@cache
def copiers() -> Copiers:
    """Those of this process."""
    return Copiers(max(1, min(_MOST, (os.cpu_count() or 1) // 2)))
