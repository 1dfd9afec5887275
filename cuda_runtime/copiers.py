"""Threads that copy memory of the host; one core alone copies a fifth of what the bus takes."""

from __future__ import annotations

import ctypes
import os
from _thread import allocate_lock
from functools import cache
from queue import SimpleQueue
from threading import Thread
from typing import Any

__all__ = ["Copiers", "copiers"]

_MOST = 7  # beside the thread that asks
_ALONE = 1 << 17  # bytes that one thread copies sooner than others wake
_PAGE = 4096  # shares end where pages do


class Copiers:
    """Threads with a queue of copies each. A copy leaves the interpreter's lock to others while it runs."""

    def __init__(self, count: int) -> None:
        self._queues: list[SimpleQueue[tuple[int, int, int, Any]]] = [SimpleQueue() for _ in range(count)]
        for queue in self._queues:
            Thread(target=_serve, args=(queue,), name="npu-copier", daemon=True).start()

    def begin(self, target: int, source: int, nbytes: int) -> Pending:
        """Begins to copy bytes from one address to another; both stay valid until `Pending.finish` returns."""
        threads = len(self._queues) + 1 if nbytes > _ALONE else 1
        share = -(-nbytes // (threads * _PAGE)) * _PAGE
        pending = Pending(target, source, min(share, nbytes))
        for number, queue in enumerate(self._queues, 1):
            begin = number * share
            if begin < nbytes:
                done = allocate_lock()
                done.acquire()
                pending.others.append(done)
                queue.put((target + begin, source + begin, min(share, nbytes - begin), done))
        return pending


class Pending:
    """A copy that others have begun."""

    def __init__(self, target: int, source: int, nbytes: int) -> None:
        self._own = target, source, nbytes
        self.others: list[Any] = []

    def finish(self) -> None:
        """Copies the caller's own share, and waits for the others'."""
        ctypes.memmove(*self._own)
        for done in self.others:
            done.acquire()


def _serve(queue: SimpleQueue[tuple[int, int, int, Any]]) -> None:
    while True:
        target, source, nbytes, done = queue.get()
        ctypes.memmove(target, source, nbytes)
        done.release()


@cache
def copiers() -> Copiers:
    """Those of this process."""
    return Copiers(max(0, min(_MOST, (os.cpu_count() or 1) // 2 - 1)))
