"""Calls from arrays to arrays, through memory of the executor's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from npu_compiler.errors import InputError
from npu_runtime import Device, Executor, NPUBuffer, Weights, array_calls, load_weights
from tests.runtime.plans import SHAPE, axpy_program, counter_program, padded_program

W = np.linspace(-1, 1, 20, dtype=np.float32).reshape(SHAPE)


@pytest.fixture(scope="module")
def weights(device: Device) -> Weights:
    return load_weights({"layer.weight": W}, axpy_program(), device)


@pytest.fixture(params=["own memory", "memory for each call"])
def executor(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> Executor:
    if request.param == "memory for each call":
        monkeypatch.setattr(array_calls, "_MOST_BYTES", 0)
    return Executor(axpy_program(), device)


def filled(value: float) -> Any:
    return np.full(SHAPE, value, np.float32)


def expected(value: float) -> Any:
    return np.asarray(3 * (2 * value + W) + value)


def test_results_are_the_caller_s_to_keep(executor: Executor, weights: Weights, device: Device) -> None:
    given = filled(0.5)
    first = executor.compute({"x": given}, weights)["out"]
    given[:] = 7
    second = executor.compute({"x": filled(-1)}, weights)["out"]
    buffer = NPUBuffer.from_numpy(filled(2), device, spec=axpy_program().input_specs[0])
    third = executor.compute({"x": buffer}, weights)["out"]
    for result, value in ((first, 0.5), (second, -1), (third, 2)):
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, expected(value), atol=2e-2)


def test_each_tensor_counts_as_one_transfer(executor: Executor, weights: Weights, device: Device) -> None:
    transfers = device.backend.transfers
    before = transfers.uploads.count, transfers.downloads.count
    executor.compute({"x": filled(1)}, weights)
    assert (transfers.uploads.count, transfers.downloads.count) == (before[0] + 1, before[1] + 1)


def test_a_call_allocates_nothing(weights: Weights, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Executor(axpy_program(), device)
    executor.compute({"x": filled(1)}, weights)
    monkeypatch.setattr(device.backend, "allocate", lambda nbytes: pytest.fail("memory was asked for"))
    np.testing.assert_allclose(executor.compute({"x": filled(3)}, weights)["out"], expected(3), atol=2e-2)


def test_what_pads_a_tensor_stays_zero(device: Device) -> None:
    program = padded_program()
    executor, (spec,) = Executor(program, device), program.input_specs
    weights = load_weights({"layer.weight": np.ones(spec.shape, np.float32)}, program, device)
    assert spec.layout.is_padded
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal(spec.shape).astype(np.float32)
        (result,) = executor.compute({spec.name: x}, weights).values()
        (wanted,) = executor.run({spec.name: x}, weights).values()
        np.testing.assert_array_equal(result, wanted.to_numpy())
        content = executor._own.receive(spec.name, x).data.reading().view(np.float16).reshape(4, 5)
        assert not content[:, 3:].any()


def test_arrays_that_do_not_fit(executor: Executor, weights: Weights) -> None:
    with pytest.raises(InputError, match="values up to 1e\\+06 in magnitude, float16"):
        executor.compute({"x": filled(1e6)}, weights)
    with pytest.raises(InputError, match="given an array of shape"):
        executor.compute({"x": filled(1)[:1]}, weights)
    with pytest.raises(InputError, match="given an array of dtype int32"):
        executor.compute({"x": filled(1).astype(np.int32)}, weights)
    with pytest.raises(InputError, match="missing: 'x'"):
        executor.compute({}, weights)
    with pytest.raises(InputError, match="given a list as inputs"):
        executor.compute([filled(1)], weights)  # type: ignore[arg-type]
    np.testing.assert_allclose(executor.compute({"x": filled(1)}, weights)["out"], expected(1), atol=2e-2)


def test_other_weights_are_seen(executor: Executor, weights: Weights, device: Device) -> None:
    executor.compute({"x": filled(1)}, weights)
    others = load_weights({"layer.weight": W * 2}, axpy_program(), device)
    result = executor.compute({"x": filled(1)}, others)["out"]
    np.testing.assert_allclose(result, 3 * (2 + W * 2) + 1, atol=2e-2)


def test_calls_from_several_threads(executor: Executor, weights: Weights) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda value: executor.compute({"x": filled(value)}, weights)["out"], range(12))
        for value, result in enumerate(results):
            np.testing.assert_allclose(result, expected(value), atol=5e-2)


def test_a_state_stays_where_it_is(device: Device) -> None:
    program = counter_program()
    executor = Executor(program, device)
    values = {
        spec.name: NPUBuffer.from_numpy(np.ones(spec.shape, spec.host_dtype.numpy), device, spec)
        for spec in program.input_specs
    }
    updated = {output for output, _ in executor.plan.state}
    assert updated
    assert not updated & executor.compute(values).keys()


@pytest.mark.parametrize("asked", [{"fetched": ["elsewhere"]}, {"fetched": [], "kept": ["elsewhere"]}])
def test_an_output_that_there_is_not_is_refused(executor: Executor, weights: Weights, asked: Any) -> None:
    with pytest.raises(InputError, match="given the output 'elsewhere' to bring back, expected some of 'out'"):
        executor.run_and_fetch({"x": filled(1)}, weights, **asked)
