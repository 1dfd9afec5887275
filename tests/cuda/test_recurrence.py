"""Recurrent layers on CUDA: which sizes a cluster holds, that their kernels compile, what they compute on a device."""

from __future__ import annotations

import pytest
import torch

import npu_compiler
from npu_compiler.artifact.plan import CallOption, ExecutionPlan, KernelCall, options_of
from npu_runtime import Device
from tests.cuda.kernels import check_plan_compiles
from tests.ops import test_ops
from tests.ops.cases import Case
from tests.ops.recurrent_cases import layers

BOTH = pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])

HELD = [
    layers("lstm", 40, 1, 32, 512),
    layers("lstm", 40, 32, 32, 512, batch_first=True),
    layers("lstm", 40, 3, 32, 256, both=True, count=2),
    layers("lstm", 60, 150, 16, 128),
    layers("lstm", 40, 5, 16, 96, projected=32),
    layers("gru", 40, 9, 32, 512),
    layers("gru", 40, 2, 32, 75, both=True, biases=False),
    layers("rnn_tanh", 40, 4, 32, 1000),
    layers("rnn_relu", 40, 17, 32, 64),
]
STEPPED = [layers("lstm", 4, 2, 32, 1024), layers("gru", 3, 5, 33, 901, both=True)]
TILED = [
    layers("lstm", 4, 11, 32, 1160, both=True),
    layers("gru", 3, 35, 32, 1200),
    layers("rnn_relu", 3, 40, 32, 4104),
]
_ARCHITECTURES = (90, 90, 90, 80, 70, 90, 90, 90, 90, 80, 70, 90, 80, 90)  # by case


def plan_of(case: Case) -> ExecutionPlan:
    return npu_compiler.compile(case.ir(torch.float32), "cuda").main


def entries(plan: ExecutionPlan, option: CallOption) -> list[str]:
    return [plan.kernels[call.kernel].entry for call in option.calls if isinstance(call, KernelCall)]


@pytest.mark.parametrize("case", HELD, ids=str)
def test_a_cluster_that_holds_the_weights_is_preferred_and_any_device_has_a_way(case: Case) -> None:
    plan, steps = plan_of(case), int(case.args[0].shape[case.args[-1] is True])
    choices = [step for step in plan.steps if "recurrence_cluster" in entries(plan, options_of(step)[0])]
    assert choices
    for choice in choices:
        first, second = options_of(choice)
        assert (first.requires, second.requires) == ("sm_90", "")
        assert entries(plan, second) == ["recurrence_step"] * steps


@pytest.mark.parametrize(
    ("case", "ways"),
    [*zip(STEPPED, [("recurrence_tile", "recurrence_step"), ("recurrence_step",)], strict=True)],
    ids=str,
)
def test_weights_that_no_cluster_holds_take_a_launch_for_each_step(case: Case, ways: tuple[str, ...]) -> None:
    plan, steps = plan_of(case), case.args[0].shape[0]
    for place, way in enumerate(ways):
        chosen = [options_of(step) for step in plan.steps]
        names = [name for options in chosen for name in entries(plan, options[min(place, len(options) - 1)])]
        assert [name for name in names if "recurrence" in name] == [way] * steps


@pytest.mark.parametrize(
    ("case", "architecture"), [*zip([*HELD, *STEPPED, *TILED], _ARCHITECTURES, strict=True)], ids=str
)
def test_kernels_compile(case: Case, architecture: int) -> None:
    check_plan_compiles(plan_of(case), architecture)


@BOTH
@pytest.mark.parametrize("case", [*HELD, *STEPPED, *TILED], ids=str)
def test_equals_torch(case: Case, compute: torch.dtype, device: Device) -> None:
    test_ops.check(case.storing(60), torch.float32, compute, device)
