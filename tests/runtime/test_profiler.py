"""The profiler counts what was run, once."""

from __future__ import annotations

import numpy as np
import pytest

from npu_compiler.errors import InputError
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from npu_runtime.profiler import Profiler
from tests.runtime.plans import COUNT, SHAPE, axpy_program, counter_program


def test_kernels_runs_and_transfers_are_measured(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    program = axpy_program()
    profiler = Profiler(Executor(program, device))
    weights = load_weights({"layer.weight": np.ones(SHAPE, np.float32)}, program, device)
    x = NPUBuffer.from_numpy(np.ones(SHAPE, np.float32), device, program.input_specs[0])
    for _ in range(3):
        outputs = profiler.run(inputs={"x": x}, weights=weights)
    np.testing.assert_array_equal(outputs["out"].to_numpy(), np.full(SHAPE, 10))

    profile = profiler.profile()
    (kernel,) = profile.kernels
    assert (kernel.name, kernel.count) == ("axpy", 6)
    assert (kernel.flops, kernel.nbytes) == (6 * 2 * COUNT, 6 * 6 * COUNT)
    assert kernel.seconds > 0
    assert kernel.mean == pytest.approx(kernel.seconds / 6)
    assert kernel.gflops == pytest.approx(kernel.flops / kernel.seconds / 1e9)
    assert kernel.gbytes == pytest.approx(kernel.nbytes / kernel.seconds / 1e9)
    assert len(profile.runs) == 3
    assert (profile.uploads.count, profile.uploads.nbytes) == (2, 80)
    assert (profile.downloads.count, profile.downloads.nbytes) == (1, 40)
    assert profile.uploads.seconds > 0
    assert profile.downloads.seconds > 0

    profiler.print_summary()
    printed = capsys.readouterr().out
    for expected in ("axpy", "total ms", "count", "mean ms", "GFLOP/s", "GB/s", "to the device", "whole run"):
        assert expected in printed


def test_a_state_is_updated_once(device: Device) -> None:
    program = counter_program()
    counter, step = (NPUBuffer.from_numpy(np.full(8, n), device, program.input_specs[0]) for n in (5, 2))
    outputs = Profiler(Executor(program, device)).run({"counter": counter, "step": step})
    np.testing.assert_array_equal(counter.to_numpy(), np.full(8, 7))
    np.testing.assert_array_equal(outputs["before"].to_numpy(), np.full(8, 5))


def test_wrong_inputs_are_refused_and_a_profile_of_nothing_is_empty(
    device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler = Profiler(Executor(counter_program(), device))
    with pytest.raises(InputError, match="missing: 'counter', 'step'"):
        profiler.run({})
    assert profiler.profile().kernels == ()
    assert profiler.profile().runs == ()
    profiler.print_summary()
    assert "whole run" in capsys.readouterr().out
