"""Two convolutions of one tap, one behind the other: when they are one launch, and what that computes.

What a kernel computes is seen on this machine's processor, thread by thread, and where there is a GPU on that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.images import convolution
from npu_compiler.artifact.plan import Buffer, ExecutionPlan, KernelCall, Role, options_of
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.cuda.kernels import check_compile
from tests.support.host_kernels import HAS_COMPILER, run_plan_on_host


@dataclass(frozen=True)
class Case:
    """``y = relu(conv(a) + shortcut)`` and ``relu(conv(y))``; the shortcut is an image, a convolution, or none.

    With `behind`, an image whose rows are not channels is added to what the second convolution gives.
    """

    size: tuple[int, int] = (9, 7)
    channels: int = 64
    made: int = 128
    outputs: int = 64
    shortcut: str = "image"
    stored: bool = True
    behind: bool = False
    batch: int = 2
    dtype: torch.dtype = torch.float16

    @property
    def module(self) -> Pair:
        torch.manual_seed(0)
        return Pair(self).eval().to(self.dtype)

    @property
    def images(self) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        channels = {"image": [self.made], "convolution": [64], "none": []}[self.shortcut]
        channels += [self.outputs] if self.behind else []
        shapes = [(self.batch, count, *self.size) for count in (self.channels, *channels)]
        return tuple(torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)

    @property
    def ir(self) -> dict[str, Any]:
        return npu_compiler.extract(self.module, self.images).ir

    @property
    def program(self) -> CompiledProgram:
        return npu_compiler.compile(self.ir, target="cuda")


class Pair(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.first = torch.nn.Conv2d(case.channels, case.made, 1)
        self.last = torch.nn.Conv2d(case.made, case.outputs, 1)
        if case.shortcut == "convolution":
            self.other = torch.nn.Conv2d(64, case.made, 1)

    def forward(self, a: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self.first(a)
        if self.case.shortcut != "none":
            made = made + (self.other(others[0]) if self.case.shortcut == "convolution" else others[0])
        made = torch.relu(made)
        last = self.finished(made, others)
        return (made, last) if self.case.stored else (last,)

    def finished(self, made: torch.Tensor, others: tuple[torch.Tensor, ...]) -> torch.Tensor:
        last = self.last(made)
        return torch.relu(last + others[-1] if self.case.behind else last)


CASES = [
    Case(),
    Case((5, 5), channels=128, made=64, outputs=128, shortcut="none", dtype=torch.bfloat16),
    Case((13, 11), made=256, outputs=128, stored=False),
    Case((8, 9), made=192, outputs=64, shortcut="convolution", batch=3),
    Case((7, 9), outputs=128, behind=True),
]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets one launch be quicker, however small images are."""
    monkeypatch.setattr(convolution, "back_to_back_microseconds", lambda *_: 0.0)


def joined(plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with its one step's preferred way as its steps."""
    (step,) = plan.steps
    return replace(plan, steps=options_of(step)[0].calls)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_are_one_launch_where_warpgroups_multiply(case: Case) -> None:
    plan = case.program.main
    (step,) = plan.steps
    ways = options_of(step)
    entries = [[plan.kernels[call.kernel].entry for call in way.calls if isinstance(call, KernelCall)] for way in ways]
    assert (ways[0].requires, entries[0]) == (WARPGROUPS, ["conv2d_back_to_back"])
    assert all(names == ["conv2d", "conv2d"] for names in entries[1:])
    assert any(not way.requires for way in ways)
    check_compile([plan.kernels[call.kernel] for call in ways[0].calls if isinstance(call, KernelCall)], 90)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gives_what_pytorch_gives(case: Case, device: Device) -> None:
    program = case.program
    state = {name: value.float().numpy() for name, value in case.module.state_dict().items()}
    given = {
        spec.name: NPUBuffer.from_numpy(image.float().numpy(), device, spec=spec)
        for spec, image in zip(program.input_specs, case.images, strict=True)
    }
    found = Executor(program, device).run(given, load_weights(state, program, device))
    arrays = [found[spec.name].to_numpy(spec=spec).astype(np.float32) for spec in program.output_specs]
    check([torch.from_numpy(array) for array in arrays], case)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("backwards", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_on_the_processor_give_both_results(case: Case, backwards: int, tmp_path: Path) -> None:
    plan = joined(case.program.main)
    (call,) = plan.calls
    assert isinstance(call, KernelCall)
    # so few blocks that each takes several tiles
    call = replace(call, grid=(2, 1, 1), params=backwards.to_bytes(4, "little") + call.params[4:])
    found = run_plan_on_host(replace(plan, steps=(call,)), bytes_of(case, plan), tmp_path)
    shape = (case.batch, *case.size, -1)
    outputs = [
        torch.from_numpy(found[spec.name].copy()).view(case.dtype).reshape(shape).permute(0, 3, 1, 2)
        for spec in plan.outputs
    ]
    check(outputs, case)


def bytes_of(case: Case, plan: ExecutionPlan) -> dict[str, NDArray[np.uint8]]:
    """Inputs, in the orders that the plan expects, and weights, channels last, as they lie in memory."""
    images = {spec.name: image.permute(spec.layout.order) for spec, image in zip(plan.inputs, case.images, strict=True)}
    weights = {
        f"p_{name.replace('.', '_')}": value.permute(0, 2, 3, 1) if value.dim() == 4 else value
        for name, value in case.module.state_dict().items()
    }
    return {name: value.contiguous().view(torch.uint8).numpy() for name, value in {**images, **weights}.items()}


def check(found: list[torch.Tensor], case: Case) -> None:
    """Against float64; the second result is that of the first one as it was rounded, where that is seen."""
    module = case.module.double()
    with torch.inference_mode():
        made, last = Pair.forward(_storing(module), *(image.double() for image in case.images))
        if case.stored:
            last = module.finished(found[0].double(), tuple(image.double() for image in case.images[1:]))
    step = torch.finfo(case.dtype).eps
    for given, expected in zip(found, (made, last) if case.stored else (last,), strict=True):
        torch.testing.assert_close(given.double(), expected, rtol=1.1 * step / 2, atol=step / (8 if case.stored else 1))


class Blocks(torch.nn.Module):
    """The end of a residual block, and the next block; or what `behind` makes of both results."""

    def __init__(self, behind: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.behind, self.pair = behind, Pair(Case(made=64, outputs=64))
        self.wide = torch.nn.Conv2d(64, 64, 1)

    def forward(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        made = torch.relu(self.pair.first(a) + x)
        if self.behind is not None:
            return self.behind(made, self.pair.last(made))
        return torch.relu(self.wide(torch.relu(self.pair.last(made))) + made)


def _blocks(behind: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None) -> CompiledProgram:
    torch.manual_seed(0)
    images = torch.zeros(1, 64, 7, 6), torch.zeros(1, 64, 7, 6)
    return npu_compiler.compile(npu_compiler.extract(Blocks(behind).eval(), images).ir, target="cuda")


def entries_of(plan: ExecutionPlan) -> list[str]:
    """Kernels of the preferred ways."""
    calls = [call for step in plan.steps for call in options_of(step)[0].calls]
    return [plan.kernels[call.kernel].entry for call in calls if isinstance(call, KernelCall)]


def test_who_else_reads_the_first_results_comes_behind() -> None:
    plan = _blocks().main
    assert entries_of(plan) == ["conv2d_back_to_back", "conv2d"]
    first, last = plan.steps
    written = {argument.buffer for argument in options_of(first)[0].calls[0].args if argument.writes}
    assert written <= {argument.buffer for argument in last.args} | {plan.buffers.index(_arena(plan))}
    assert "conv2d + add" in first.label


def _arena(plan: ExecutionPlan) -> Buffer:
    return next(buffer for buffer in plan.buffers if buffer.role is Role.ARENA)


@pytest.mark.parametrize(
    "behind",
    [
        lambda made, last: last + made,
        lambda made, last: last + made.mean((2, 3), keepdim=True),
        lambda made, last: torch.nn.functional.max_pool2d(last, 2) + torch.nn.functional.max_pool2d(made, 2),
    ],
    ids=["a sum of both", "of what is made of the first", "none of both"],
)
def test_a_second_epilogue_that_needs_the_first_results_is_a_launch_of_its_own(
    behind: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], request: pytest.FixtureRequest
) -> None:
    joins = "none of both" in request.node.name
    assert ("conv2d_back_to_back" in entries_of(_blocks(behind).main)) is joins


def test_small_images_are_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert entries_of(CASES[0].program.main) == ["conv2d", "conv2d"]
    large = replace(CASES[0], size=(56, 56), made=256, batch=64)
    assert entries_of(large.program.main) == ["conv2d_back_to_back"]


@pytest.mark.parametrize(
    "case",
    [
        *(Case(channels=32), Case(made=96), Case(outputs=160), Case(outputs=96)),
        # without room for weights, or for results that nothing leaves a place
        *(Case(channels=256, made=512, outputs=128), Case(channels=128, made=256, outputs=128, shortcut="none")),
    ],
    ids=str,
)
def test_others_are_two_launches(case: Case) -> None:
    assert entries_of(case.program.main) == ["conv2d", "conv2d"]


def _storing(module: Pair) -> Pair:
    module.case = replace(module.case, stored=True)
    return module
