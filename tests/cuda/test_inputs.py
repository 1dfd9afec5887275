"""Arrays of the host on their way into what a plan reads, on a device that only pretends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from cuda_runtime import CUDAExecutor, inputs
from cuda_runtime.cupy_api import cupy
from cuda_runtime.inputs import Narrowed
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError
from tests.cuda.pretended import PretendedBackend, pretended_cupy
from tests.ops.cases import case, floats

SHAPE = (1, 3, 150, 201)  # narrowed by PyTorch's threads, and read over the bus
LARGE = (1, 3, 450, 420)  # narrowed and sent in sections
SMALL = (1, 3, 50, 67)  # copied as it is


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedBackend]:
    pretended_cupy(monkeypatch)
    monkeypatch.setattr(inputs, "_SECTION", 200_000)
    device = PretendedBackend()
    device.steps = _add
    yield device
    cupy.cache_clear()


@pytest.fixture
def executor(backend: PretendedBackend) -> CUDAExecutor:
    return CUDAExecutor(_program(SHAPE), backend)


def _add(a: NDArray[Any], b: NDArray[Any], out: NDArray[Any]) -> None:
    np.add(a, b, out=out, casting="unsafe")


def _program(shape: tuple[int, ...]) -> CompiledProgram:
    ir = case("add.Tensor", floats(*shape), floats(*shape)).ir(torch.float16)
    return npu_compiler.compile(ir, target="cuda")


def _arrays(
    rng: np.random.Generator, kind: Any = np.float32, shape: tuple[int, ...] = SHAPE
) -> dict[str, NDArray[Any]]:
    return {name: rng.standard_normal(shape).astype(kind) for name in ("x0", "x1")}


def _sum(given: dict[str, NDArray[Any]]) -> NDArray[Any]:
    return np.add(*(each.astype(np.float16) for each in given.values()))


def _only(outputs: dict[str, Any]) -> Any:
    (output,) = outputs.values()
    return output


def _narrowed(executor: CUDAExecutor) -> list[Narrowed]:
    return list(executor._calls._narrowed.values())


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [SHAPE, LARGE, SMALL], ids=["over the bus", "in sections", "as they are"])
@pytest.mark.parametrize("with_torch", [False, True], ids=["without PyTorch", "with PyTorch"])
def test_arrays_that_change_between_calls(
    backend: PretendedBackend,
    rng: np.random.Generator,
    kind: Any,
    shape: tuple[int, ...],
    with_torch: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, given = CUDAExecutor(_program(shape), backend), _arrays(rng, kind, shape)
    if not with_torch:
        monkeypatch.delitem(sys.modules, "torch")
    for number in range(4):
        given["x0"][...] += number
        np.testing.assert_array_equal(_only(executor.compute(given)), _sum(given))
        np.testing.assert_array_equal(_only(executor.run(given)).to_numpy(), _sum(given))
    assert len(_narrowed(executor)) == (2 if with_torch and kind is np.float32 and shape != SMALL else 0)


def test_some_arrays_of_a_run_may_be_on_the_device(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    given = _arrays(rng)
    executor.compute(given)
    first = executor.upload({"x0": given["x0"]})
    for _ in range(3):
        given["x1"] += 1
        np.testing.assert_array_equal(_only(executor.compute({**given, **first})), _sum(given))
        np.testing.assert_array_equal(_only(executor.compute(given)), _sum(given))


@pytest.mark.parametrize("shape", [SHAPE, LARGE], ids=["over the bus", "in sections"])
def test_an_array_of_other_strides_is_not_taken_for_one_that_lies_in_a_row(
    backend: PretendedBackend, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    """One without memory of its own for each number had been read beyond its end, where it was read-only."""
    executor, given = CUDAExecutor(_program(shape), backend), _arrays(rng, shape=shape)
    for _ in range(2):
        np.testing.assert_array_equal(_only(executor.compute(given)), _sum(given))
        strided = {**given, "x0": np.broadcast_to(np.float32(3), shape)}
        np.testing.assert_array_equal(_only(executor.compute(strided)), _sum(strided))


def test_numbers_that_are_too_large_are_refused_once(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    given = _arrays(rng)
    for name in given:
        good = given[name][0, 0, 0, 0]
        given[name][0, 0, 0, 0] = -65520.0  # the smallest that float16 rounds to infinity
        for run in (executor.compute, executor.run):
            with pytest.raises(InputError, match=rf"'{name}': given values up to 6\.552e\+04 in magnitude.*bfloat16"):
                run(given)
        given[name][0, 0, 0, 0] = good
        np.testing.assert_array_equal(_only(executor.compute(given)), _sum(given))
    given["x0"][0, 0, 0, 0] = np.inf
    assert np.isinf(_only(executor.compute(given))[0, 0, 0, 0])


def test_a_refused_run_says_nothing_of_the_next_one(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    """What the device had noted of the second array was told of the next run, which had another."""
    given = _arrays(rng)
    executor.compute(given)
    second = executor.upload({"x1": given["x1"]})
    with pytest.raises(InputError, match="'x0'"):
        executor.compute({name: np.full_like(each, 1e6) for name, each in given.items()})
    np.testing.assert_array_equal(_only(executor.compute({**given, **second})), _sum(given))


def test_a_fault_leaves_no_refusal_for_the_next_run(
    executor: CUDAExecutor, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an index beyond its tensor hid of the same run's inputs was told of the next run."""
    given = _arrays(rng, np.float64)
    executor.compute(given)

    def look() -> None:
        raise InputError("an index lies beyond its tensor")

    with monkeypatch.context() as patch:
        patch.setattr(executor._faults, "look", look)
        with pytest.raises(InputError, match="an index"):
            executor.compute({**given, "x0": np.full_like(given["x0"], 1e6)})
    np.testing.assert_array_equal(_only(executor.compute(given)), _sum(given))


def test_an_array_may_change_where_a_run_is_not_waited_for(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    given, outputs, wanted = _arrays(rng), [], []
    for number in range(4):
        given["x0"][...] = number
        wanted.append(_sum(given))
        outputs.append(_only(executor.run(given, sync=False)))
        np.testing.assert_array_equal(_only(executor.compute(given)), wanted[-1])
    for output, expected in zip(outputs, wanted, strict=True):
        np.testing.assert_array_equal(output.to_numpy(), expected)


def test_executors_side_by_side(backend: PretendedBackend, rng: np.random.Generator) -> None:
    program = _program(SHAPE)
    siblings = [backend.sibling() for _ in range(4)]
    for each in siblings:
        each.steps = _add
    executors = [CUDAExecutor(program, each) for each in siblings]

    def work(executor: CUDAExecutor, given: dict[str, NDArray[Any]]) -> None:
        for number in range(20):
            given["x0"][...] = number
            np.testing.assert_array_equal(_only(executor.compute(given)), _sum(given))

    with ThreadPoolExecutor(len(executors)) as pool:
        list(pool.map(work, executors, [_arrays(rng) for _ in executors]))  # raises what one of them did


def test_the_arrays_are_let_go_once_the_run_is_over(executor: CUDAExecutor, rng: np.random.Generator) -> None:
    executor.compute(_arrays(rng))
    assert [each._value for each in _narrowed(executor)] == [None, None]
