"""Two convolutions of one tap, one behind the other: when they are one launch, and what that computes.

What a kernel computes is seen on this machine's processor, thread by thread, and where there is a GPU on that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.images import convolution
from npu_compiler.artifact.plan import CallChoice, ExecutionPlan, KernelCall, options_of
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.cuda.kernels import check_compile
from tests.support.host_kernels import HAS_COMPILER, run_plan_on_host
from tests.support.ir_builder import IRBuilder


@dataclass(frozen=True)
class Case:
    """``y = relu(conv(a) + shortcut)`` and ``relu(conv(y))``; the shortcut is an image, a convolution of one, or none."""

    size: tuple[int, int] = (9, 7)
    channels: int = 64
    made: int = 128
    outputs: int = 64
    shortcut: str = "image"
    stored: bool = True
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
        shapes = [(self.batch, count, *self.size) for count in (self.channels, *channels)]
        return tuple(torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)

    @property
    def program(self) -> CompiledProgram:
        return npu_compiler.compile(npu_compiler.extract(self.module, self.images).ir, target="cuda")

    @property
    def outputs_of(self) -> int:
        return 2 if self.stored else 1


class Pair(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.first = torch.nn.Conv2d(case.channels, case.made, 1)
        self.last = torch.nn.Conv2d(case.made, case.outputs, 1)
        if case.shortcut == "convolution":
            self.other = torch.nn.Conv2d(64, case.made, 1)

    def forward(self, a: torch.Tensor, x: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        made = self.first(a)
        if x is not None:
            made = made + (self.other(x) if self.case.shortcut == "convolution" else x)
        made = torch.relu(made)
        last = torch.relu(self.last(made))
        return (made, last) if self.case.stored else (last,)


CASES = [
    Case(),
    Case((5, 5), channels=128, made=64, outputs=128, shortcut="none", dtype=torch.bfloat16),
    Case((13, 11), made=256, outputs=96, stored=False),
    Case((8, 9), made=192, outputs=32, shortcut="convolution", batch=3),
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
    """Inputs and weights as they lie in memory: channels last."""
    images = {spec.name: image for spec, image in zip(plan.inputs, case.images, strict=True)}
    weights = {f"p_{name.replace('.', '_')}": value for name, value in case.module.state_dict().items()}
    return {
        name: (value.permute(0, 2, 3, 1) if value.dim() == 4 else value).contiguous().view(torch.uint8).numpy()
        for name, value in {**images, **weights}.items()
    }


def check(found: list[torch.Tensor], case: Case) -> None:
    """Against float64; the second result is that of the first one as it was rounded, where that is seen."""
    module = case.module.double()
    with torch.inference_mode():
        made, last = Pair.forward(_storing(module), *(image.double() for image in case.images))
        if case.stored:
            last = torch.relu(module.last(found[0].double()))
    step = torch.finfo(case.dtype).eps
    for given, expected in zip(found, (made, last) if case.stored else (last,), strict=True):
        torch.testing.assert_close(given.double(), expected, rtol=1.1 * step / 2, atol=step / (8 if case.stored else 1))


def _storing(module: Pair) -> Pair:
    module.case = replace(module.case, stored=True)
    return module
