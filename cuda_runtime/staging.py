"""Pinned memory of the host, through which bytes cross to and from a device in pieces."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from threading import Condition
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_runtime.cupy_api import cupy

__all__ = ["Staging"]

_PIECE_BYTES = 8 << 20
_MAX_PIECES = 12
_STRIP_BYTES = 1 << 19  # what one core copies in a few dozen microseconds
_HELPERS = max(0, min(5, (os.cpu_count() or 1) // 2 - 1))

Bytes = NDArray[np.uint8]


class _Piece:
    """A part of the pinned memory.

    Attributes:
        content: The memory.
        pointer: Its address.
        crossed: The device's event behind the last copy from or to it.
    """

    def __init__(self) -> None:
        memory = cupy().cuda.alloc_pinned_memory(_PIECE_BYTES)
        self.content: Bytes = np.frombuffer(memory, np.uint8, _PIECE_BYTES)
        self.pointer = int(memory.ptr)
        self.crossed = cupy().cuda.Event(disable_timing=True)


class Staging:
    """A few pieces of pinned memory, which copies take in turns; several threads may copy at once.

    While one piece crosses, the next one is being filled. Its methods are called with the device current.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pieces: deque[_Piece] = deque()  # that nobody is filling or reading; the longest unused first
        self._count = 0
        self._returned = Condition()

    def upload(self, source: Bytes, pointer: int) -> None:
        """Copies bytes to a device address, in the stream's order. When it returns, `source` may change."""
        for begin in range(0, source.nbytes, _PIECE_BYTES):
            part = source[begin : begin + _PIECE_BYTES]
            piece = self._wait_for_one()
            try:
                piece.crossed.synchronize()
                _in_strips(part.nbytes, partial(self._send, part, pointer + begin, piece))
                piece.crossed.record(self._stream)
            finally:
                self._give_back(piece)

    def _send(self, part: Bytes, pointer: int, piece: _Piece, begin: int, end: int) -> None:
        piece.content[begin:end] = part[begin:end]
        self._copy(pointer + begin, piece.pointer + begin, end - begin)

    def download(self, pointer: int, nbytes: int) -> Bytes:
        """A new array with the bytes at a device address, once all that was asked of the stream before has happened."""
        target = np.empty(nbytes, np.uint8)
        crossing: deque[tuple[int, _Piece]] = deque()
        for begin in range(0, nbytes, _PIECE_BYTES):
            if len(crossing) == 2:
                self._land(*crossing.popleft(), target)
            piece = self._take() if crossing else self._wait_for_one()
            if piece is None:  # whoever waits must hold none, or threads could wait for each other
                self._land(*crossing.popleft(), target)
                piece = self._wait_for_one()
            self._copy(piece.pointer, pointer + begin, min(_PIECE_BYTES, nbytes - begin))
            piece.crossed.record(self._stream)
            crossing.append((begin, piece))
        while crossing:
            self._land(*crossing.popleft(), target)
        return target

    def _land(self, begin: int, piece: _Piece, target: Bytes) -> None:
        piece.crossed.synchronize()
        part = target[begin : begin + _PIECE_BYTES]
        _in_strips(part.nbytes, partial(_copy_strip, piece.content, part))
        self._give_back(piece)

    def _wait_for_one(self) -> _Piece:
        with self._returned:
            while (piece := self._take()) is None:
                self._returned.wait()
            return piece

    def _take(self) -> _Piece | None:
        """A piece for the caller alone, a new one while there are few and the others cross; None where all are out."""
        with self._returned:
            if self._pieces and (self._count == _MAX_PIECES or self._pieces[0].crossed.done):
                return self._pieces.popleft()
            if self._count == _MAX_PIECES:
                return None
            piece = _Piece()
            self._count += 1
            return piece

    def _give_back(self, piece: _Piece) -> None:
        with self._returned:
            self._pieces.append(piece)
            self._returned.notify()

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, self._stream.ptr)


def _copy_strip(source: Bytes, target: Bytes, begin: int, end: int) -> None:
    target[begin:end] = source[begin:end]


def _in_strips(nbytes: int, copy: Callable[[int, int], None]) -> None:
    """Copies `nbytes` bytes, strip by strip from `begin` to `end`, by several threads where there are many."""
    strips = deque((begin, min(begin + _STRIP_BYTES, nbytes)) for begin in range(0, nbytes, _STRIP_BYTES))

    def work() -> None:
        with suppress(IndexError):  # of an empty deque
            while True:
                copy(*strips.popleft())

    helpers = [_workers().submit(work) for _ in range(min(_HELPERS, len(strips) - 2))]
    work()
    for helper in helpers:
        helper.result()


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HELPERS, "npu-staging")
