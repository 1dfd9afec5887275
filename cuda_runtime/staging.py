"""Pinned memory of the host, through which bytes cross to and from a device in pieces."""

from __future__ import annotations

from collections import deque
from functools import partial
from threading import Condition
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_runtime.copiers import Copy, by_torch, copiers, in_sections
from cuda_runtime.cupy_api import cupy
from npu_compiler.integers import ceil_div

__all__ = ["PIECE_BYTES", "Piece", "Staging"]

PIECE_BYTES = 8 << 20
_MAX_PIECES = 12
_AT_ONCE = 6  # pieces that one copy takes
_SECTION_BYTES = 2 << 20  # filled by one thread; handing over the interpreter's lock takes as long as a few hundred KiB
_PAGE = 4096

Bytes = NDArray[np.uint8]


class Piece:
    """A part of the pinned memory.

    Attributes:
        content: The memory.
        pointer: Its address.
        crossed: The device's event behind the last copy from or to it.
    """

    def __init__(self) -> None:
        memory = cupy().cuda.alloc_pinned_memory(PIECE_BYTES)
        self.content: Bytes = np.frombuffer(memory, np.uint8, PIECE_BYTES)
        self.pointer = int(memory.ptr)
        self.crossed = cupy().cuda.Event(disable_timing=True)


class Staging:
    """A few pieces of pinned memory, which copies take in turns; several threads may copy at once.

    While one piece crosses, the next one is being filled. Its methods are called with the device current.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._pieces: deque[Piece] = deque()  # that nobody is filling or reading; the longest unused first
        self._count = self._lent = 0
        self._returned = Condition()

    def upload(self, source: Bytes, pointer: int) -> None:
        """Copies bytes to a device address, in the stream's order. When it returns, `source` may change."""
        begin = 0
        while begin < source.nbytes:
            pieces = [self._wait_for_one()]
            while len(pieces) < _AT_ONCE and len(pieces) * PIECE_BYTES < source.nbytes - begin:
                more = self._take()
                if more is None:
                    break
                pieces.append(more)
            try:
                end = min(begin + len(pieces) * PIECE_BYTES, source.nbytes)
                self._send(source[begin:end], pointer + begin, pieces)
                begin = end
            finally:
                for piece in pieces:
                    self._give_back(piece)

    def _send(self, source: Bytes, pointer: int, pieces: list[Piece]) -> None:
        """Fills pieces section by section; whoever has filled one sends it, while others are being filled."""
        start, sections = source.ctypes.data, []
        shares = 1 if by_torch() else copiers().count
        size = min(_SECTION_BYTES, ceil_div(source.nbytes, shares * _PAGE) * _PAGE)
        for number, piece in enumerate(pieces):
            piece.crossed.synchronize()
            first = number * PIECE_BYTES
            length = min(PIECE_BYTES, source.nbytes - first)
            for begin in range(0, length, size):
                nbytes = min(size, length - begin)
                send = partial(self._copy, pointer + first + begin, piece.pointer + begin, nbytes)
                sections.append(Copy(piece.pointer + begin, start + first + begin, nbytes, send))
        copiers().run(sections)
        for piece in pieces:
            piece.crossed.record(self._stream)

    def download(self, pointer: int, nbytes: int) -> Bytes:
        """A new array with the bytes at a device address, once all that was asked of the stream before has happened."""
        target = np.empty(nbytes, np.uint8)
        crossing: deque[tuple[int, Piece]] = deque()
        for begin in range(0, nbytes, PIECE_BYTES):
            if len(crossing) == 2:
                self._land(*crossing.popleft(), target)
            piece = self._take() if crossing else self._wait_for_one()
            if piece is None:  # whoever waits must hold none, or threads could wait for each other
                self._land(*crossing.popleft(), target)
                piece = self._wait_for_one()
            self._copy(piece.pointer, pointer + begin, min(PIECE_BYTES, nbytes - begin))
            piece.crossed.record(self._stream)
            crossing.append((begin, piece))
        while crossing:
            self._land(*crossing.popleft(), target)
        return target

    def lend(self, nbytes: int) -> Piece | None:
        """A piece to fill with `nbytes` bytes, then to `send` and to `take_back`; None where none is at hand.

        Nobody waits here, and the last piece is never lent: whoever holds some may copy otherwise, too.
        """
        with self._returned:
            if not 0 < nbytes <= PIECE_BYTES or self._lent == _MAX_PIECES - 1:
                return None
            piece = self._take()
            self._lent += piece is not None
        if piece is not None:
            try:
                piece.crossed.synchronize()
            except BaseException:
                self.take_back(piece)
                raise
        return piece

    def send(self, piece: Piece, pointer: int, nbytes: int) -> None:
        """Copies the first bytes of a piece to a device address, in the stream's order."""
        self._copy(pointer, piece.pointer, nbytes)
        piece.crossed.record(self._stream)

    def take_back(self, piece: Piece) -> None:
        """A piece that was lent is free again, once what was sent of it has crossed."""
        with self._returned:
            self._lent -= 1
            self._give_back(piece)

    def _give_back(self, piece: Piece) -> None:
        with self._returned:
            self._pieces.append(piece)
            self._returned.notify()

    def _land(self, begin: int, piece: Piece, target: Bytes) -> None:
        piece.crossed.synchronize()
        part = target[begin : begin + PIECE_BYTES]
        copiers().run(in_sections(part.ctypes.data, piece.pointer, part.nbytes, _SECTION_BYTES))
        self._give_back(piece)

    def _wait_for_one(self) -> Piece:
        with self._returned:
            while (piece := self._take()) is None:
                self._returned.wait()
            return piece

    def _take(self) -> Piece | None:
        """A piece for the caller alone, a new one while there are few and the others cross; None where all are out."""
        with self._returned:
            if self._pieces and (self._count == _MAX_PIECES or self._pieces[0].crossed.done):
                return self._pieces.popleft()
            if self._count == _MAX_PIECES:
                return None
            piece = Piece()
            self._count += 1
            return piece

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, self._stream.ptr)
