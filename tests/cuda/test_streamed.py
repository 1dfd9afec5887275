"""Arrays that are filled behind the launch: whole, in time, and not used where something comes in between."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from cuda_runtime import CUDAExecutor, streamed
from cuda_runtime.cupy_api import cupy
from cuda_runtime.streamed import Arrival, Streamed, streamed_text
from npu_compiler.errors import DeviceError, InputError
from npu_compiler.integers import ceil_div
from npu_runtime import Device
from tests.cuda.kernels import compile_together
from tests.cuda.pretended import PretendedBackend, pretended_cupy
from tests.ops.cases import case, floats

SHAPE = (1, 3, 150, 201)


@pytest.fixture(autouse=True)
def whatever_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is held up but by what a test does."""
    monkeypatch.setattr(streamed, "_HELD_UP", 10_000_000_000)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedBackend]:
    pretended_cupy(monkeypatch)
    monkeypatch.setattr(streamed, "_PATIENCE", 10_000_000_000)  # on whatever machine this runs
    device = PretendedBackend()
    device.steps = lambda a, b, out: np.add(a, b, out=out, casting="unsafe")
    yield device
    cupy.cache_clear()


@pytest.fixture
def executor(backend: PretendedBackend) -> CUDAExecutor:
    ir = case("add.Tensor", floats(*SHAPE), floats(*SHAPE)).ir(torch.float16)
    return CUDAExecutor(npu_compiler.compile(ir, target="cuda"), backend)


def _arrays(rng: np.random.Generator, kind: Any = np.float32) -> dict[str, NDArray[Any]]:
    return {name: rng.standard_normal(SHAPE).astype(kind) for name in ("x0", "x1")}


def _sum(inputs: dict[str, NDArray[Any]]) -> NDArray[Any]:
    return np.add(*(each.astype(np.float16) for each in inputs.values()))


def _only(outputs: dict[str, Any]) -> Any:
    (output,) = outputs.values()
    return output


def _streams(executor: CUDAExecutor) -> list[Streamed]:
    return [each for each in executor._calls._watched.values() if isinstance(each, Streamed)]


@pytest.mark.parametrize("architecture", [70, 90])
def test_kernels_compile(architecture: int) -> None:
    pairs = [("float32", "float16"), ("float64", "bfloat16"), ("float16", "float16")]
    compile_together([(streamed_text(*pair), ("convert_streamed",)) for pair in pairs], architecture)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("with_torch", [False, True])
def test_arrays_that_change_between_calls(
    executor: CUDAExecutor, rng: np.random.Generator, kind: Any, with_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_torch:
        monkeypatch.delitem(sys.modules, "torch")
    inputs = _arrays(rng, kind)
    for number in range(8):
        inputs["x0"][...] += number
        np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))
        np.testing.assert_array_equal(_only(executor.run(inputs)).to_numpy(), _sum(inputs))
    assert len(_streams(executor)) == 2
    (start, *_, end) = (each.first for each in _streams(executor))
    assert (start, end) == (0, ceil_div(inputs["x0"].nbytes, streamed._SECTION_BYTES))


def test_the_graph_is_launched_ahead_of_the_arrays(
    executor: CUDAExecutor, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _arrays(rng)
    executor.compute(inputs)
    order: list[str] = []

    def noting(what: str, function: Any) -> Any:
        def noted(*given: Any) -> Any:
            order.append(what)
            return function(*given)

        return noted

    monkeypatch.setattr(Streamed, "numbers", noting("filled", Streamed.numbers))
    stream = executor._cuda.stream
    monkeypatch.setattr(stream, "ask", noting("asked", stream.ask))
    executor.compute(inputs)
    *nodes, first, second, wait = order
    assert (set(nodes), first, second, wait) == ({"asked"}, "filled", "filled", "asked")


def test_sections_are_counted_past_the_largest_word(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    inputs = _arrays(rng)
    executor.compute(inputs)
    arrival = executor._calls._arrival
    arrival._end = arrival._words[1] = (1 << 32) - 9
    for number in range(5):
        inputs["x1"][...] = number
        np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))


def test_some_arrays_of_a_run_may_be_on_the_device(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    inputs = _arrays(rng)
    executor.compute(inputs)
    first = executor.upload({"x0": inputs["x0"]})
    for _ in range(3):
        inputs["x1"] += 1
        np.testing.assert_array_equal(_only(executor.compute({**inputs, **first})), _sum(inputs))
        np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))


@pytest.mark.parametrize("shape", [SHAPE, (1, 3, 300, 301)], ids=["streamed", "narrowed"])
def test_an_array_of_other_strides_is_not_taken_for_one_that_lies_in_a_row(
    backend: PretendedBackend, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    """One without memory of its own for each number had been read beyond its end, where it was read-only."""
    ir = case("add.Tensor", floats(*shape), floats(*shape)).ir(torch.float16)
    executor = CUDAExecutor(npu_compiler.compile(ir, target="cuda"), backend)
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name in ("x0", "x1")}
    for _ in range(2):
        np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))
        strided = {**inputs, "x0": np.broadcast_to(np.float32(3), shape)}
        np.testing.assert_array_equal(_only(executor.compute(strided)), _sum(strided))


def _fails(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
    """The copy of a section raises."""
    real, count = np.bitwise_or, iter(range(100))

    def copy(*given: Any) -> None:
        if next(count) == at:
            raise error
        real(*given)

    monkeypatch.setattr(streamed, "_copy_bits", copy)


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), ValueError("odd")], ids=repr)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_what_comes_in_between_ends_the_run_and_nothing_else(
    executor: CUDAExecutor, rng: np.random.Generator, error: BaseException, at: int
) -> None:
    inputs = _arrays(rng)
    executor.compute(inputs)
    inputs["x0"][...] = 1e6  # would be refused, were it looked at
    with pytest.MonkeyPatch.context() as patch:
        _fails(patch, at, error)
        with pytest.raises(type(error)):
            executor.compute(inputs)
    assert not executor._calls.was_late()
    inputs = _arrays(rng)
    if at:
        np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))
    np.testing.assert_array_equal(_only(executor.run(inputs, sync=False)).to_numpy(), _sum(inputs))
    np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))


def test_interrupts_at_any_time(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    """Ctrl-C wherever it hits: the device never waits for the rest, and the next run is right."""
    inputs = _arrays(rng)
    executor.compute(inputs)
    hits = 0
    for number in range(120):
        timer = threading.Timer(1e-5 + number % 40 * 2e-5, signal.raise_signal, (signal.SIGINT,))
        try:
            timer.start()
            while timer.is_alive():
                executor.compute(inputs)
        except KeyboardInterrupt:
            hits += 1
        try:
            timer.join()
        except KeyboardInterrupt:
            hits += 1
        inputs["x0"][...] = number
        np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))
    assert hits == 120
    assert not executor._calls.was_late()


def test_a_run_that_waited_in_vain_is_run_again(
    executor: CUDAExecutor, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = _arrays(rng)
    executor.compute(inputs)
    monkeypatch.setattr(streamed, "_PATIENCE", 1_000_000)

    def copy(*given: Any) -> None:
        time.sleep(0.01)
        np.bitwise_or(*given)

    monkeypatch.setattr(streamed, "_copy_bits", copy)
    for number in range(3):
        inputs["x1"][...] = number
        np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))
        np.testing.assert_array_equal(_only(executor.run(inputs)).to_numpy(), _sum(inputs))
    np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))


def test_who_is_held_up_copies_the_rest_at_once(
    executor: CUDAExecutor, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each section may cost the interpreter's lock, which threads that compute keep for 5 ms."""
    inputs = _arrays(rng)
    executor.compute(inputs)
    copied: list[int] = []

    def copy(source: NDArray[Any], *given: Any) -> None:
        copied.append(source.size)
        time.sleep(0.002)
        np.bitwise_or(source, *given)

    monkeypatch.setattr(streamed, "_copy_bits", copy)
    monkeypatch.setattr(streamed, "_HELD_UP", 1_000_000)
    inputs["x1"] += 1
    np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))
    section, size = streamed._SECTION_BYTES // 4, inputs["x0"].size
    assert copied == [section, size - section, size]


def test_numbers_that_are_too_large_are_refused_once(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    inputs = _arrays(rng)
    for name in inputs:
        good = inputs[name][0, 0, 0, 0]
        inputs[name][0, 0, 0, 0] = -65520.0  # the smallest that float16 rounds to infinity
        for run in (executor.compute, executor.run):
            with pytest.raises(InputError, match=rf"'{name}': given values up to 6\.552e\+04 in magnitude.*bfloat16"):
                run(inputs)
        inputs[name][0, 0, 0, 0] = good
        np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))
    both = {name: np.full_like(each, 1e6) for name, each in inputs.items()}
    with pytest.raises(InputError, match="'x0'"):
        executor.compute(both)
    inputs["x0"][0, 0, 0, 0] = np.inf
    assert np.isinf(_only(executor.compute(inputs))[0, 0, 0, 0])


def test_an_array_may_change_where_a_run_is_not_waited_for(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    inputs, outputs, wanted = _arrays(rng), [], []
    for number in range(4):
        inputs["x0"][...] = number
        wanted.append(_sum(inputs))
        outputs.append(_only(executor.run(inputs, sync=False)))
        np.testing.assert_array_equal(_only(executor.compute(inputs)), wanted[-1])
    for output, expected in zip(outputs, wanted, strict=True):
        np.testing.assert_array_equal(output.to_numpy(), expected)


def test_executors_side_by_side_do_not_wait_for_each_other(
    backend: PretendedBackend, executor: CUDAExecutor, rng: np.random.Generator
) -> None:
    ir = case("add.Tensor", floats(*SHAPE), floats(*SHAPE)).ir(torch.float16)
    program = npu_compiler.compile(ir, target="cuda")
    siblings = [backend.sibling() for _ in range(4)]
    for each in siblings:
        each.steps = backend.steps
    executors = [CUDAExecutor(program, each) for each in siblings]
    failures: list[BaseException] = []

    def work(executor: CUDAExecutor, inputs: dict[str, NDArray[Any]]) -> None:
        try:
            for number in range(20):
                inputs["x0"][...] = number
                np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(each, _arrays(rng))) for each in executors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_arrays_are_let_go_once_the_run_is_over(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    executor.compute(_arrays(rng))
    assert [each._value for each in _streams(executor)] == [None, None]


def test_a_launch_that_is_refused_leaves_nothing_that_waits(backend: PretendedBackend) -> None:
    arrival = Arrival(backend)
    arrival.take(5)

    class _Refused:
        def launch(self, _: object) -> None:
            raise DeviceError("refused")

    with pytest.raises(DeviceError, match="refused"):
        arrival.launch(_Refused(), None, [])
    assert list(arrival._words) == [0, 5, 0]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [SHAPE, (40_001,), (5, 7, 11, 90)], ids=str)
def test_a_device_reads_what_arrives(
    device: Device, rng: np.random.Generator, kind: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quickly filled, slowly, too late, and not at all."""
    ir = case("add.Tensor", floats(*shape), floats(*shape)).ir(torch.float16)
    executor = CUDAExecutor(npu_compiler.compile(ir, target="cuda"), device)
    inputs = {name: rng.standard_normal(shape).astype(kind) for name in ("x0", "x1")}
    for pause in (0.0, 0.0, 1e-4, 1e-3, 0.06, 0.0):

        def copy(*given: Any, pause: float = pause) -> None:
            time.sleep(pause)
            np.bitwise_or(*given)

        monkeypatch.setattr(streamed, "_copy_bits", copy)
        inputs["x0"][...] = rng.standard_normal(shape)
        np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))
        np.testing.assert_array_equal(_only(executor.run(inputs)).to_numpy(), _sum(inputs))
    assert len(_streams(executor)) == 2
    for at in range(2):
        with pytest.MonkeyPatch.context() as patch:
            _fails(patch, at, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                executor.compute(inputs)
        np.testing.assert_array_equal(_only(executor.compute(inputs)), _sum(inputs))
