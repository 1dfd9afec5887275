"""Plans of real models, as text under version control: a change of plan shows in review.

``pytest tests/golden --update-golden`` writes the files anew.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import npu_compiler
from npu_cli.extras import import_torchvision
from npu_compiler.codegen.plan import ExecutionPlan, KernelCall

FOLDER = Path(__file__).parent
DISPATCHES = {"resnet18": 23, "resnet50": 56}


@cache
def plan_of(name: str) -> ExecutionPlan:
    model = getattr(import_torchvision().models, name)(weights=None).eval()
    extraction = npu_compiler.extract(model, (torch.zeros(1, 3, 224, 224),), model_name=name)
    return npu_compiler.compile(extraction.ir).main


def rendered(plan: ExecutionPlan) -> str:
    """One line a launch: kernel, grid, block, bytes that must move, arithmetic, and the nodes it covers."""
    lines = [f"{len(plan.steps)} launches of {len(plan.kernels)} kernels, arena of {plan.arena_bytes} bytes"]
    for step in plan.steps:
        assert isinstance(step, KernelCall)
        grid, block = ("x".join(map(str, sizes)) for sizes in (step.grid, step.block))
        kernel = plan.kernels[step.kernel].entry
        lines.append(f"{kernel:<14} {grid:>11} {block:>8} {step.nbytes:>9} B {step.flops:>11} FLOP  {step.label}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", DISPATCHES)
def test_the_plan_is_as_recorded(name: str, request: pytest.FixtureRequest) -> None:
    text = rendered(plan_of(name))
    path = FOLDER / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), f"the plan of {name} changed; if it should have, run pytest with --update-golden"


@pytest.mark.parametrize("name", DISPATCHES)
def test_each_convolution_takes_its_norm_addition_and_activation_along(name: str) -> None:
    assert len(plan_of(name).steps) <= DISPATCHES[name]
