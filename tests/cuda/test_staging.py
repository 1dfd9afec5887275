"""Bytes through pieces of pinned memory, on a device that only pretends: whole, in order, from many threads."""

from __future__ import annotations

import ctypes
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cuda_runtime import staging
from cuda_runtime.copiers import Copiers, Copy
from cuda_runtime.staging import Staging

PIECE = 64
PIECES = 4


class _Event:
    done = True

    def record(self, _: object) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pieces of pinned memory that were made; the device's memory is the host's, and copies are done at once."""
    pieces: list[Any] = []

    def alloc_pinned_memory(nbytes: int) -> Any:
        memory = (ctypes.c_ubyte * nbytes)()
        memory.ptr = ctypes.addressof(memory)  # type: ignore[attr-defined]
        pieces.append(memory)
        return memory

    runtime = SimpleNamespace(
        memcpyDefault=4, memcpyAsync=lambda target, source, nbytes, *_: ctypes.memmove(target, source, nbytes)
    )
    cuda = SimpleNamespace(alloc_pinned_memory=alloc_pinned_memory, runtime=runtime, Event=lambda **_: _Event())
    monkeypatch.setattr(staging, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(staging, "_MAX_PIECES", PIECES)
    return pieces


def _there_and_back(pieces: Staging, content: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    memory = np.zeros_like(content)
    pieces.upload(content, memory.ctypes.data)
    return np.array_equal(memory, content) and np.array_equal(
        pieces.download(memory.ctypes.data, content.nbytes), content
    )


@pytest.mark.parametrize("nbytes", [0, 1, PIECE - 1, PIECE, PIECE + 1, 7 * PIECE + 3])
def test_bytes_arrive_as_they_left(made: list[Any], nbytes: int, rng: np.random.Generator) -> None:
    assert _there_and_back(Staging(SimpleNamespace(ptr=0)), rng.integers(0, 256, nbytes, np.uint8))


def test_one_thread_needs_few_pieces(made: list[Any], rng: np.random.Generator) -> None:
    assert _there_and_back(Staging(SimpleNamespace(ptr=0)), rng.integers(0, 256, 50 * PIECE, np.uint8))
    assert len(made) <= 6


def test_more_threads_than_pieces_do_not_wait_for_each_other_for_ever(
    made: list[Any], rng: np.random.Generator
) -> None:
    pieces = Staging(SimpleNamespace(ptr=0))
    contents = [rng.integers(0, 256, 40 * PIECE + number, np.uint8) for number in range(16)]
    start = threading.Barrier(len(contents))

    def run(content: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
        start.wait(10)
        return all(_there_and_back(pieces, content) for _ in range(20))

    with ThreadPoolExecutor(len(contents)) as workers:
        assert all(workers.map(run, contents, timeout=60))
    assert len(made) <= PIECES


@pytest.mark.parametrize("with_torch", [False, True])
def test_sections_are_copied_by_threads_of_either_kind(with_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_torch:
        monkeypatch.setitem(sys.modules, "torch", None)
    source = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    source.flags.writeable = False
    target = np.zeros_like(source)
    sent: list[int] = []
    copies = [
        Copy(target.ctypes.data + at, source.ctypes.data + at, 1 << 16, partial(sent.append, at))
        for at in range(0, 1 << 20, 1 << 16)
    ]
    Copiers(4).run(copies)
    assert np.array_equal(target, source)
    assert sorted(sent) == list(range(0, 1 << 20, 1 << 16))
