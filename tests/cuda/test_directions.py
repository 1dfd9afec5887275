"""From which end launches over images take their tiles: the other one than the last to use their largest tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from cuda_compiler.images import overlaps, pooled_windows
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from npu_compiler.lowering.target import Lowering
from tests.cuda import test_overlapping_windows, test_pooled_windows
from tests.support.host_kernels import HAS_COMPILER, run_on_host


class Bottlenecks(torch.nn.Module):
    """Two residual blocks whose narrow images are a quarter of the wide ones."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.across, self.wide = (
            torch.nn.ModuleList(part) for part in zip(_block(), _block(), strict=True)
        )
        self.pool = torch.nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for narrow, across, wide in zip(self.narrow, self.across, self.wide, strict=True):
            x = torch.relu(x + wide(torch.relu(across(torch.relu(narrow(x))))))
        pooled: torch.Tensor = self.pool(x)
        return pooled


def _block() -> tuple[torch.nn.Module, ...]:
    narrow, wide = torch.nn.Conv2d(256, 64, 1), torch.nn.Conv2d(64, 256, 1)
    return narrow, torch.nn.Conv2d(64, 64, 3, padding=1), wide


def ends(plan: ExecutionPlan) -> list[int]:
    """What the first parameter of each step's preferred launch says."""
    calls = [options_of(step)[0].calls[-1] for step in plan.steps]
    return [int.from_bytes(call.params[:4], "little") for call in calls if isinstance(call, KernelCall)]


def test_launches_go_on_where_the_largest_tensor_was_left() -> None:
    ir = npu_compiler.extract(Bottlenecks().eval(), torch.zeros(8, 256, 28, 28)).ir
    # narrow, across, wide with the shortcut that `narrow` read, twice; then the pooling
    assert ends(npu_compiler.compile(ir, target="cuda").main) == [0, 1, 1, 0, 1, 1, 0]


def test_all_ways_to_compute_a_group_are_given_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(self: Lowering, question: Callable[[int, Lowering], Any], buffer: int) -> Any:
        asked.append(buffer)
        return answered(self, question, buffer)

    answered = Lowering.ask
    monkeypatch.setattr(Lowering, "ask", ask)
    ir = npu_compiler.extract(torch.nn.Conv2d(64, 64, 3, padding=1).eval(), torch.zeros(8, 64, 28, 28)).ir
    (step,) = npu_compiler.compile(ir, target="cuda").main.steps
    assert len(options_of(step)) > 1
    assert len(asked) == 1


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("windows", ["pooled", "overlapping"])
def test_results_are_the_same_from_either_end(windows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlaps, "_blocks", lambda conv, device: 1)
    monkeypatch.setattr(pooled_windows._Costs, "of", lambda device: pooled_windows._Costs(2, 0))
    if windows == "pooled":
        pooled = test_pooled_windows.Case((61, 77))
        plan, tensors = pooled.program.main, test_pooled_windows.bytes_of(pooled)
    else:
        case = test_overlapping_windows.Case((40, 30))
        plan, tensors = case.program.main, test_overlapping_windows.bytes_of(case)
    (call,) = options_of(plan.steps[0])[0].calls
    assert isinstance(call, KernelCall)
    other = dataclasses.replace(call, params=(1 - call.params[0]).to_bytes(4, "little") + call.params[4:])
    found = [run_on_host(plan, each, tensors, tmp_path) for each in (call, other)]
    np.testing.assert_array_equal(found[0], found[1])
