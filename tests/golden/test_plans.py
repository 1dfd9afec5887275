"""Plans of real models, as text under version control: a change of plan shows in review.

``pytest tests/golden --update-golden`` writes the files anew.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_compiler
from npu_cli.extras import import_torchvision
from npu_compiler.artifact.plan import Call, ExecutionPlan, KernelCall, options_of
from npu_compiler.frontend.decoder_request import BatchRequest
from tests.support.decoders import import_transformers, make_decoder

FOLDER = Path(__file__).parent
TRANSFORMERS = (5, 23)  # older ones compute the angles of rotary embedding by a matrix product
DISPATCHES = {"resnet18": 23, "resnet50": 56}  # on Metal
LAYERS = 2
A_LAYER = {"decode": 6, "prefill_16": 8}  # launches of a layer on Metal: what keeps 28 layers within 170 and 230
AROUND = {"decode": 2, "prefill_16": 1}  # angles and mask together, the head; less the last layer's norm of one row

BATCH = BatchRequest((8,), 64, chunks=(64,))
A_LAYER_OF_MANY = {"decode_8": 5, "chunk_64": 6}  # launches of a layer on CUDA: norms between products take none
AROUND_OF_MANY = {"decode_8": 4, "chunk_64": 0}  # with the norm of embeddings; of a chunk's last layer keys and values

on_each_target = pytest.mark.parametrize("target", ["metal", "cuda"])


@cache
def extracted(name: str) -> dict[str, Any]:
    model = getattr(import_torchvision().models, name)(weights=None).eval()
    return npu_compiler.extract(model, (torch.zeros(1, 3, 224, 224),), model_name=name).ir


@cache
def plan_of(name: str, target: str) -> ExecutionPlan:
    return npu_compiler.compile(extracted(name), target=target).main


def rendered(plan: ExecutionPlan) -> str:
    """One line a launch: kernel, grid, block, bytes that must move, arithmetic, and the nodes it covers.

    Of a choice the preferred option is shown, with the number of options.
    """
    lines = [f"{len(plan.calls)} launches of {len(plan.kernels)} kernels, arena of {plan.arena_bytes} bytes"]
    for step in plan.steps:
        options = options_of(step)
        for call in options[0].calls:
            label = f"{call.label} ({len(options)} options)" if len(options) > 1 else call.label
            lines.append(f"{_what(call, plan)} {call.nbytes:>9} B {call.flops:>11} FLOP  {label}")
    return "\n".join(lines) + "\n"


def _what(call: Call, plan: ExecutionPlan) -> str:
    if not isinstance(call, KernelCall):
        return f"library {call.routine:<27}"
    grid, block = ("x".join(map(str, sizes)) for sizes in (call.grid, call.block))
    return f"{plan.kernels[call.kernel].entry:<14} {grid:>11} {block:>8}"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Qwen2 of two layers."""
    version = import_transformers().__version__
    if tuple(map(int, version.split(".")[:2])) < TRANSFORMERS:
        pytest.skip(f"plans of decoders are recorded with transformers 5.23 or newer, and this is {version}")
    return make_decoder(tmp_path_factory.mktemp("qwen2"), "Qwen2", batch=BATCH).folder


def decoder_plan(folder: Path, function: str, target: str) -> ExecutionPlan:
    functions = {name: folder / f"{name}.json" for name in (A_LAYER if function in A_LAYER else A_LAYER_OF_MANY)}
    return npu_compiler.compile(functions, target=target).functions[function]


@on_each_target
@pytest.mark.parametrize("function", [*A_LAYER, *A_LAYER_OF_MANY])
def test_the_plan_of_a_decoder_is_as_recorded(
    function: str, target: str, decoder: Path, request: pytest.FixtureRequest
) -> None:
    check_recorded(f"{target}/qwen2_{function}", rendered(decoder_plan(decoder, function, target)), request)


@pytest.mark.parametrize("function", A_LAYER)
def test_a_layer_of_a_decoder_takes_few_launches(function: str, decoder: Path) -> None:
    plan = decoder_plan(decoder, function, "metal")
    assert len(plan.steps) == AROUND[function] + LAYERS * A_LAYER[function]
    kernels = [plan.kernels[step.kernel].entry for step in plan.steps if isinstance(step, KernelCall)]
    assert kernels.count("attention") == LAYERS
    assert len(plan.state) == 2 * LAYERS
    assert not plan.notes


@pytest.mark.parametrize("function", A_LAYER_OF_MANY)
def test_a_layer_for_many_texts_gathers_no_page(function: str, decoder: Path) -> None:
    plan = decoder_plan(decoder, function, "cuda")
    kernels = [plan.kernels[call.kernel].entry for call in plan.calls if isinstance(call, KernelCall)]
    assert sum(name.startswith("attention") for name in kernels) == LAYERS - (function == "chunk_64")
    assert len(plan.steps) == AROUND_OF_MANY[function] + LAYERS * A_LAYER_OF_MANY[function]
    assert len(plan.state) == 2 * LAYERS
    assert not plan.notes


@on_each_target
@pytest.mark.parametrize("name", DISPATCHES)
def test_the_plan_is_as_recorded(name: str, target: str, request: pytest.FixtureRequest) -> None:
    check_recorded(f"{target}/{name}", rendered(plan_of(name, target)), request)


def check_recorded(name: str, text: str, request: pytest.FixtureRequest) -> None:
    path = FOLDER / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), f"the plan of {name} changed; if it should have, run pytest with --update-golden"


@pytest.mark.parametrize("name", DISPATCHES)
def test_each_convolution_takes_its_norm_addition_and_activation_along(name: str) -> None:
    assert len(plan_of(name, "metal").steps) <= DISPATCHES[name]
