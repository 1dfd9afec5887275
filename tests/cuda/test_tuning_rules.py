"""Tuning without a GPU: what is timed, which option wins, what is remembered. The timer is made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuda_runtime.backend import CUDABackend
from cuda_runtime.tuning import Tuner
from cuda_runtime.tuning_results import TuningResults, choice_digest, tuning_directory
from npu_cli.main import main
from npu_compiler.artifact.plan import CallChoice, CallOption, ExecutionPlan, KernelCall, LibraryCall
from npu_compiler.errors import DeviceError, InputError
from npu_runtime import Device
from npu_runtime.tuning import OptionTimes, Tuning
from tests.cuda.choices import choice_program


class _Backend(CUDABackend):
    """Runs nothing: a call takes as many microseconds as its label says, and more where the call before it is slow.

    Attributes:
        runs: How many runs were timed.
    """

    def __init__(self, capability: int = 90, after_slow: float = 0.0) -> None:
        self.name, self.capability, self.runs, self.overlapping = "fake GPU", capability, 0, 1
        self.results = TuningResults(self.name, capability)
        self.after_slow = after_slow

    def prepare(self, plan: ExecutionPlan) -> Any:
        return _Plan(self, plan)


class _Plan:
    def __init__(self, backend: _Backend, plan: ExecutionPlan) -> None:
        self.backend, self.plan = backend, plan

    def timer(self, buffers: Sequence[Any], spans: Sequence[range]) -> Callable[[], list[float]]:
        def run() -> list[float]:
            self.backend.runs += 1
            labels = [call.label for call in self.plan.calls]
            penalty = self.backend.after_slow if len(spans) == 1 and "10" in labels else 0.0
            return [sum(float(labels[number]) for number in span) * 1e-6 + penalty for span in spans]

        return run


def _plan(*times: int, requires: str = "") -> ExecutionPlan:
    """A plan that makes one choice three times, between options that take some microseconds; then a fixed call."""
    plan = choice_program().main
    (choice, _) = plan.steps
    assert isinstance(choice, CallChoice)
    call = replace(choice.options[1].calls[0], args=())
    assert isinstance(call, KernelCall)
    options = [
        CallOption(requires if index == 0 else "", (replace(call, label=str(time), params=bytes([index])),))
        for index, time in enumerate(times)
    ]
    step = CallChoice(tuple(options))
    return replace(plan, steps=(step, step, replace(call, label="3"), step), state=())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path))


def _tuned(plan: ExecutionPlan, backend: _Backend) -> Tuning:
    return Tuner(plan, backend, ()).tune()


def test_the_quickest_option_wins_and_is_taken_from_then_on() -> None:
    plan, backend = _plan(10, 8, 9), _Backend()
    assert [call.label for call in plan.resolved(backend.select).calls] == ["10", "10", "3", "10"]
    tuning = _tuned(plan, backend)
    (tuned,) = tuning.choices
    assert (tuned.label, tuned.count, tuned.times.winner) == ("10", 3, 1)
    assert tuned.times.microseconds == pytest.approx((10, 8, 9))
    assert (tuning.before, tuning.after) == pytest.approx((33e-6, 27e-6))
    assert [call.label for call in plan.resolved(backend.select).calls] == ["8", "8", "3", "8"]
    assert [call.label for call in plan.resolved(_Backend().select).calls] == ["8", "8", "3", "8"]


def test_an_option_that_is_hardly_quicker_does_not_win() -> None:
    (tuned,) = _tuned(_plan(10000, 9995), _Backend()).choices
    assert tuned.times.winner == 0


def test_an_option_that_makes_the_whole_run_slower_does_not_win() -> None:
    plan, backend = _plan(12, 10), _Backend(after_slow=1.0)
    tuning = _tuned(plan, backend)
    assert tuning.after == tuning.before
    assert tuning.choices[0].times.winner == 0
    assert tuning.choices[0].times.microseconds == pytest.approx((12, 10))


def test_an_option_that_is_slow_in_its_place_is_not_tried_in_the_run() -> None:
    few, many = _Backend(), _Backend()
    _tuned(_plan(10, 12), few)
    _tuned(_plan(12, 10), many)
    assert few.runs < many.runs


def test_what_the_device_cannot_run_is_not_timed() -> None:
    plan = _plan(1, 10, 5, requires="sm_90a")
    (tuned,) = _tuned(plan, _Backend(80)).choices
    assert tuned.times.microseconds[0] is None
    assert tuned.times.winner == 2
    assert _tuned(_plan(1, 10, requires="sm_90a"), _Backend(80)) == Tuning(())


def test_a_plan_without_choices_is_not_run() -> None:
    backend = _Backend()
    plan = _plan(2, 1)
    assert _tuned(plan.resolved(lambda choice, kernels: 0), backend) == Tuning(())
    assert backend.runs == 0


def test_the_digest_is_of_what_is_launched() -> None:
    def digest(change: Callable[[KernelCall], KernelCall | LibraryCall]) -> str:
        plan = _plan(2, 1)
        choice = plan.steps[0]
        assert isinstance(choice, CallChoice)
        call = choice.options[0].calls[0]
        assert isinstance(call, KernelCall)
        return choice_digest(CallChoice((CallOption("", (change(call),)), choice.options[1])), plan.kernels)

    same = [digest(lambda call: call), digest(lambda call: replace(call, label="other", flops=7))]
    others = [
        digest(lambda call: replace(call, grid=(9, 1, 1))),
        digest(lambda call: replace(call, params=b"other")),
        digest(lambda call: replace(call, kernel=0)),
        digest(lambda call: LibraryCall("l", "matmul", (), {"m": 1})),
        digest(lambda call: LibraryCall("l", "matmul", (), {"m": 2})),
    ]
    assert len(set(same)) == 1
    assert len({*same, *others}) == 6


DAMAGED: dict[str, object] = {
    "not JSON": None,
    "a list": [],
    "another format": {"format": 0, "microseconds": [2.0, 1.0], "winner": 1},
    "too few": {"format": 1, "microseconds": [1.0], "winner": 0},
    "no number": {"format": 1, "microseconds": ["2", 1.0], "winner": 1},
    "outside": {"format": 1, "microseconds": [2.0, 1.0], "winner": 2},
    "a boolean": {"format": 1, "microseconds": [2.0, 1.0], "winner": True},
    "not run": {"format": 1, "microseconds": [2.0, None], "winner": 1},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_result_counts_as_absent(name: str) -> None:
    plan = _plan(10, 8)
    _tuned(plan, _Backend())
    (path,) = tuning_directory().iterdir()
    assert plan.resolved(_Backend().select).calls[0].label == "8"
    path.write_text("{" if DAMAGED[name] is None else json.dumps(DAMAGED[name]))
    assert plan.resolved(_Backend().select).calls[0].label == "10"


def test_results_are_of_one_kind_of_device() -> None:
    plan = _plan(10, 8)
    _tuned(plan, _Backend())
    assert plan.resolved(_Backend(80).select).calls[0].label == "10"


def test_a_cache_that_cannot_be_written_costs_the_next_process_its_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NPU_CACHE_DIR", str(blocked))
    plan, backend = _plan(10, 8), _Backend()
    _tuned(plan, backend)
    assert plan.resolved(backend.select).calls[0].label == "8"
    assert plan.resolved(_Backend().select).calls[0].label == "10"


def test_a_requirement_that_nobody_knows_is_refused() -> None:
    with pytest.raises(DeviceError, match="requires 'sm_9000z'"):
        _plan(1, 2, requires="sm_9000z").resolved(_Backend().select)


def test_results_survive_being_written() -> None:
    results, plan = TuningResults("fake GPU", 90), _plan(2, 1)
    choice = plan.steps[0]
    assert isinstance(choice, CallChoice)
    times = OptionTimes((None, 1.5), 1)
    results.keep(choice_digest(choice, plan.kernels), times)
    assert TuningResults("fake GPU", 90).times(choice, plan.kernels) == times


def test_tuning_on_another_device_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choice_program().save(tmp_path / "doubled.npubin")
    assert main(["tune", str(tmp_path / "doubled.npubin"), "--device", "software-metal"]) == 1
    assert "expected cuda or cuda:1" in capsys.readouterr().err


def test_executors_that_overlap_take_what_leaves_the_others_room(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = {
        "MultiProcessorCount": 100,
        "MaxThreadsPerMultiProcessor": 2048,
        "MaxSharedMemoryPerMultiprocessor": 228 << 10,
    }
    monkeypatch.setattr(CUDABackend, "_attributes", attributes)
    plan = _plan(10, 12)
    (choice, *_) = plan.steps
    assert isinstance(choice, CallChoice)
    large, small = (option.calls[0] for option in choice.options)
    assert isinstance(large, KernelCall)
    assert isinstance(small, KernelCall)
    large = replace(large, grid=(100, 1, 1), block=(512, 1, 1), shared_bytes=200 << 10)
    small = replace(small, grid=(10, 2, 1), block=(128, 1, 1), shared_bytes=0)
    choice = replace(choice, options=(CallOption("", (large,)), CallOption("", (small,))))
    backend = _Backend()
    backend.results.keep(choice_digest(choice, plan.kernels), OptionTimes((10.0, 12.0), 0))
    assert backend.select(choice, plan.kernels) == 0
    backend.overlapping = 4
    assert backend.select(choice, plan.kernels) == 1
    untimed = replace(choice, options=(*choice.options, *choice.options))
    assert backend.select(untimed, plan.kernels) == 0


@pytest.mark.parametrize("overlapping", [0, -1, 1.5, "4"])
def test_a_number_of_executors_that_is_none_is_refused(overlapping: Any, device: Device) -> None:
    with pytest.raises(InputError, match="how many executors run at once"):
        device.sibling(overlapping)
