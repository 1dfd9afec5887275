"""Tuning on a device: the quicker option wins, results stay, states too; and clusters are launched as such."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from cuda_runtime import CUDABackend, CUDAExecutor
from cuda_runtime.tuning_results import TuningResults, tuning_directory
from npu_cli.main import main
from npu_compiler.errors import InputError
from npu_runtime import Device, NPUBuffer
from npu_runtime.state_guard import exclusive_use
from tests.cuda.choices import COUNT, choice_program


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test."""
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def backend(device: Device, monkeypatch: pytest.MonkeyPatch) -> CUDABackend:
    """The device, having forgotten its results; one that has clusters."""
    assert isinstance(device.backend, CUDABackend)
    if device.backend.capability < 90:
        pytest.skip(f"{device.backend.name} has no clusters")
    monkeypatch.setattr(device.backend, "results", TuningResults(device.backend.name, device.backend.capability))
    return device.backend


def _inputs(device: Device) -> tuple[dict[str, NPUBuffer], NPUBuffer]:
    program = choice_program()
    x, total = program.input_specs
    state = NPUBuffer.from_numpy(np.full(1, 5, np.float32), device, spec=total)
    return {"x": NPUBuffer.from_numpy(np.arange(COUNT, dtype=np.float32), device, spec=x), "total": state}, state


def _entries(executor: CUDAExecutor) -> list[str]:
    return [kernel.entry for kernel in executor.plan.kernels]


def test_without_tuning_the_preferred_option_runs_in_clusters(device: Device, backend: CUDABackend) -> None:
    executor = CUDAExecutor(choice_program("sm_90"), device)
    inputs, state = _inputs(device)
    np.testing.assert_array_equal(executor.run(inputs)["out"].to_numpy(), 2 * np.arange(COUNT))
    assert _entries(executor) == ["clustered"]
    assert state.to_numpy() == 7


def test_a_first_run_that_tunes_takes_the_quicker_option(device: Device, backend: CUDABackend) -> None:
    executor = CUDAExecutor(choice_program("sm_90"), device, tune=True)
    assert _entries(executor) == ["clustered"]
    inputs, state = _inputs(device)
    np.testing.assert_array_equal(executor.run(inputs)["out"].to_numpy(), 2 * np.arange(COUNT))
    assert _entries(executor) == ["plain"]
    assert state.to_numpy() == 7
    executor.run(inputs)
    assert state.to_numpy() == 9


def test_the_times_are_those_of_the_options(device: Device, backend: CUDABackend) -> None:
    executor = CUDAExecutor(choice_program("sm_90", delay=100), device)
    tuning = executor.tune(_inputs(device)[0])
    (tuned,) = tuning.choices
    slow, quick = tuned.times.microseconds
    assert slow is not None
    assert quick is not None
    assert tuned.count == 2
    assert slow > 50 > quick
    assert tuning.before > 2 * 50e-6 > tuning.after


def test_another_process_finds_the_winner(device: Device, backend: CUDABackend) -> None:
    CUDAExecutor(choice_program("sm_90"), device).tune(_inputs(device)[0])
    assert len(list(tuning_directory().iterdir())) == 1
    backend.results = TuningResults(backend.name, backend.capability)
    assert _entries(CUDAExecutor(choice_program("sm_90"), device)) == ["plain"]
    for path in tuning_directory().iterdir():
        path.write_bytes(path.read_bytes()[:-4])
    backend.results = TuningResults(backend.name, backend.capability)
    assert _entries(CUDAExecutor(choice_program("sm_90"), device)) == ["clustered"]


def test_the_command_prints_what_won(backend: CUDABackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choice_program("sm_90").save(tmp_path / "doubled.npubin")
    assert main(["tune", str(tmp_path / "doubled.npubin"), "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    for text in ("main:", "ms tuned", "double", "clustered", "plain", "taken"):
        assert text in shown
    assert "nothing to choose" not in shown


def test_a_run_that_tunes_prints_the_results(
    backend: CUDABackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choice_program("sm_90").save(tmp_path / "doubled.npubin")
    np.save(tmp_path / "x.npy", np.arange(COUNT, dtype=np.float32))
    np.save(tmp_path / "total.npy", np.zeros(1, np.float32))
    given = [f"--input={name}={tmp_path / name}.npy" for name in ("x", "total")]
    assert main(["run", str(tmp_path / "doubled.npubin"), "--device", "cuda", "--tune", *given]) == 0
    assert "2046" in capsys.readouterr().out
    assert len(list(tuning_directory().iterdir())) == 1


def test_a_state_that_another_run_updates_is_refused(device: Device, backend: CUDABackend) -> None:
    executor = CUDAExecutor(choice_program("sm_90"), device)
    inputs, state = _inputs(device)
    caught: list[Exception] = []

    def run() -> None:
        try:
            executor.run(inputs)
        except InputError as error:
            caught.append(error)

    with exclusive_use({"total": state}):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert "being updated by another run" in str(caught[0])
    executor.run(inputs)
    assert state.to_numpy() == 7
