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
from npu_compiler.codegen.plan import CallChoice, ExecutionPlan, KernelCall
from tests.support.decoders import import_transformers, make_decoder

FOLDER = Path(__file__).parent
TRANSFORMERS = (5, 23)  # older ones compute the angles of rotary embedding by a matrix product
DISPATCHES = {"resnet18": 23, "resnet50": 56}
LAYERS = 2
A_LAYER = {"decode": 6, "prefill_16": 8}  # launches of a layer: what keeps 28 layers within 170 and 230
AROUND = {"decode": 2, "prefill_16": 3}  # angles and mask together, the head; in prefill also the last norm


@cache
def plan_of(name: str) -> ExecutionPlan:
    model = getattr(import_torchvision().models, name)(weights=None).eval()
    extraction = npu_compiler.extract(model, (torch.zeros(1, 3, 224, 224),), model_name=name)
    return npu_compiler.compile(extraction.ir).main


def rendered(plan: ExecutionPlan) -> str:
    """One line a launch: kernel, grid, block, bytes that must move, arithmetic, and the nodes it covers."""
    lines = [f"{len(plan.calls)} launches of {len(plan.kernels)} kernels, arena of {plan.arena_bytes} bytes"]
    for step in plan.steps:
        options = step.options if isinstance(step, CallChoice) else ()
        for call in options[0].calls if options else (step,):
            assert isinstance(call, KernelCall)
            grid, block = ("x".join(map(str, sizes)) for sizes in (call.grid, call.block))
            kernel = plan.kernels[call.kernel].entry
            label = f"{call.label} ({len(options)} options)" if options else call.label
            lines.append(f"{kernel:<14} {grid:>11} {block:>8} {call.nbytes:>9} B {call.flops:>11} FLOP  {label}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def decoder_plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExecutionPlan]:
    """The functions of a Qwen2 of two layers."""
    version = import_transformers().__version__
    if tuple(map(int, version.split(".")[:2])) < TRANSFORMERS:
        pytest.skip(f"plans of decoders are recorded with transformers 5.23 or newer, and this is {version}")
    folder = make_decoder(tmp_path_factory.mktemp("qwen2"), "Qwen2").folder
    return dict(npu_compiler.compile({name: folder / f"{name}.json" for name in A_LAYER}).functions)


@pytest.mark.parametrize("function", A_LAYER)
def test_the_plan_of_a_decoder_is_as_recorded(
    function: str, decoder_plans: dict[str, ExecutionPlan], request: pytest.FixtureRequest
) -> None:
    check_recorded(f"qwen2_{function}", rendered(decoder_plans[function]), request)


@pytest.mark.parametrize("function", A_LAYER)
def test_a_layer_of_a_decoder_takes_few_launches(function: str, decoder_plans: dict[str, ExecutionPlan]) -> None:
    plan = decoder_plans[function]
    assert len(plan.steps) == AROUND[function] + LAYERS * A_LAYER[function]
    kernels = [plan.kernels[step.kernel].entry for step in plan.steps if isinstance(step, KernelCall)]
    assert kernels.count("attention") == LAYERS
    assert len(plan.state) == 2 * LAYERS
    assert not plan.notes


@pytest.mark.parametrize("name", DISPATCHES)
def test_the_plan_is_as_recorded(name: str, request: pytest.FixtureRequest) -> None:
    check_recorded(name, rendered(plan_of(name)), request)


def check_recorded(name: str, text: str, request: pytest.FixtureRequest) -> None:
    path = FOLDER / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), f"the plan of {name} changed; if it should have, run pytest with --update-golden"


@pytest.mark.parametrize("name", DISPATCHES)
def test_each_convolution_takes_its_norm_addition_and_activation_along(name: str) -> None:
    assert len(plan_of(name).steps) <= DISPATCHES[name]
