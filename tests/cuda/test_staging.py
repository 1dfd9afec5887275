"""Bytes through pieces of pinned memory, on a device that only pretends: whole, in order, from many threads."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cuda_runtime import staging
from cuda_runtime.backend import CUDABackend
from cuda_runtime.copiers import Copiers, Copy
from cuda_runtime.device import CUDABuffer
from cuda_runtime.staging import Staging
from npu_compiler.artifact.recipes import WeightInput, WeightRecipe
from npu_compiler.dtypes import FLOAT16, DType, dtype
from npu_compiler.errors import DeviceError, WeightError
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime import load_weights, weight_parts
from npu_runtime.backend import Transfers
from tests.runtime.test_weights import program_of

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


class _Memory:
    """Memory of the pretended device, with what is asked of a CuPy array of bytes."""

    def __init__(self, content: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.content, self.nbytes = content, content.nbytes
        self.data = SimpleNamespace(ptr=content.ctypes.data)

    def __getitem__(self, part: slice) -> _Memory:
        return _Memory(self.content[part])


class _Pretended(CUDABackend):
    """The backend with nothing of CUDA in it but the way that bytes take."""

    target = "metal"  # that of `program_of`

    def __init__(self) -> None:
        self.name, self.transfers, self.staging = "Pretended", Transfers(), Staging(SimpleNamespace(ptr=0))

    def active(self) -> Any:
        return nullcontext()

    def allocate(self, nbytes: int) -> CUDABuffer:
        return CUDABuffer(self, _Memory(np.full(nbytes, 0xAA, np.uint8)))


def _content(buffer: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    content: np.ndarray[Any, np.dtype[np.uint8]] = buffer.array.content
    return content


def test_what_is_written_in_a_piece_crosses_and_nothing_else(made: list[Any]) -> None:
    buffer = _Pretended().allocate(3 * PIECE)
    with buffer.writing_part(PIECE, 10) as memory:
        memory[:] = 7
    assert len(made) == 1
    assert _content(buffer)[PIECE : PIECE + 10].tolist() == [7] * 10
    assert set(_content(buffer)[:PIECE].tolist() + _content(buffer)[PIECE + 10 :].tolist()) == {0xAA}
    with buffer.writing() as memory:  # larger than a piece
        memory[:] = np.arange(3 * PIECE)
    np.testing.assert_array_equal(_content(buffer), np.arange(3 * PIECE))
    with buffer.writing_part(0, 0) as memory:
        assert memory.size == 0


def test_a_piece_comes_back_where_its_writer_or_the_device_fails(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = _Pretended().allocate(PIECE)
    for _ in range(2 * PIECES):
        with pytest.raises(ValueError, match="broadcast"), buffer.writing() as memory:
            memory[:] = np.ones(2, np.uint8)
    assert set(_content(buffer).tolist()) == {0xAA}

    def refuse(*_: object) -> None:
        raise DeviceError("refused")

    monkeypatch.setattr(Staging, "_copy", refuse)
    for _ in range(2 * PIECES):
        with pytest.raises(DeviceError, match="refused"), buffer.writing():
            pass
    monkeypatch.setattr(_Event, "synchronize", refuse)
    for _ in range(2 * PIECES):
        with pytest.raises(DeviceError, match="refused"), buffer.writing():
            pass
    assert len(made) == 1


def test_who_writes_many_buffers_at_once_waits_for_no_piece(made: list[Any]) -> None:
    device = _Pretended()
    buffers = [device.allocate(PIECE) for _ in range(2 * PIECES)]

    def write(number: int) -> None:
        if number < len(buffers):
            with buffers[number].writing() as memory:
                memory[:] = number
                if number % PIECES != PIECES - 1:
                    write(number + 1)
            if number % PIECES == PIECES - 1:
                write(number + 1)

    worker = threading.Thread(target=write, args=(0,), daemon=True)
    worker.start()
    worker.join(20)
    assert not worker.is_alive()
    assert [int(_content(buffer)[0]) for buffer in buffers] == list(range(2 * PIECES))


def _file(path: Path, count: int, kind: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{n}": torch.rand((40 + n % 3, 6), generator=generator).to(kind) for n in range(count)}
    save_file(tensors, path)
    return tensors


def _recipes(tensors: dict[str, torch.Tensor], kind: DType) -> list[WeightRecipe]:
    """Weights of one tensor each, then of two after another, then of two in turns."""
    items = [
        WeightInput(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]
    groups = [("identity", [item]) for item in items[::3]]
    groups += [("concatenate", list(pair)) for pair in zip(items[::2], items[1::2], strict=True)]
    groups += [("interleave", list(pair)) for pair in zip(items[::3], items[3::3], strict=False)]
    return [
        WeightRecipe(
            BufferSpec(str(n), kind, kind, dense((sum(item.shape[0] for item in inputs), 6))), tuple(inputs), transform
        )
        for n, (transform, inputs) in enumerate(groups)
    ]


@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32])
def test_a_file_reaches_the_device_through_pieces_of_pinned_memory(
    made: list[Any], threads: int, given: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CUDABuffer, "part_bytes", PIECE)
    monkeypatch.setattr(weight_parts, "STEP_BYTES", 24)
    monkeypatch.setattr(os, "cpu_count", lambda: threads)
    path = tmp_path / "w.safetensors"
    tensors = _file(path, 12, given)
    kind = FLOAT16 if given is torch.float32 else dtype(str(given).removeprefix("torch."))
    recipes = _recipes(tensors, kind)
    for source in (path, tensors):
        weights = load_weights(source, program_of(*recipes), _Pretended())
        for recipe in recipes:
            rows = [tensors[item.name] for item in recipe.inputs]
            expected = torch.stack(rows, 1).reshape(-1, 6) if recipe.transform == "interleave" else torch.cat(rows)
            expected = expected.to(getattr(torch, kind.name)).view(torch.uint8)
            np.testing.assert_array_equal(_content(weights[recipe.spec.name]), expected.numpy().reshape(-1))
    assert len(made) <= 2 * PIECES


def test_a_file_with_nan_is_refused_on_its_way_to_the_device(made: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensors = _file(path, 12, torch.float16)
    tensors["t9"][39, 5] = float("nan")
    save_file(tensors, path)
    with pytest.raises(WeightError, match=r"'t9': 1 of 240 values are NaN, the first at \(39, 5\); expected numbers"):
        load_weights(path, program_of(*_recipes(tensors, FLOAT16)), _Pretended())
