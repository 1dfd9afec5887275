"""Convolutions whose windows are multiplied where a tile's pixels lie, for every tap: what they compute.

That is seen on this machine's processor, thread by thread, and where there is a GPU on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from cuda_compiler.images import overlaps
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.cuda.kernels import check_compile
from tests.support.host_kernels import HAS_COMPILER, run_on_host


@dataclass(frozen=True)
class Case:
    """A convolution of stride 1, and an activation."""

    size: tuple[int, int]
    channels: int = 64
    taps: tuple[int, int] = (3, 3)
    padding: tuple[int, int] = (1, 1)
    dilation: int = 1
    batch: int = 2
    dtype: torch.dtype = torch.float16

    @property
    def module(self) -> torch.nn.Sequential:
        torch.manual_seed(0)
        conv = torch.nn.Conv2d(self.channels, 64, self.taps, 1, self.padding, self.dilation)
        return torch.nn.Sequential(conv, torch.nn.LeakyReLU(0.5)).eval().to(self.dtype)

    @property
    def image(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, self.channels, *self.size, generator=generator).to(self.dtype)

    @property
    def program(self) -> CompiledProgram:
        ir = npu_compiler.extract(self.module, self.image, model_name="overlaps").ir
        return npu_compiler.compile(ir, target="cuda")

    def check(self, found: torch.Tensor) -> None:
        """Products are summed in float32, results are rounded once."""
        with torch.inference_mode():
            expected = self.module.double()(self.image.double())
        step = torch.finfo(self.dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=1.1 * step / 2, atol=3 * step * 2**-4)


CASES = [
    Case((40, 30)),
    Case((56, 17), batch=1, dtype=torch.bfloat16),
    Case((33, 40), channels=32, taps=(5, 3), padding=(0, 2)),
    Case((64, 24), channels=16, dilation=2, padding=(2, 1)),
    Case((48, 20), taps=(1, 7), padding=(0, 3)),
]


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets few tiles be enough."""
    monkeypatch.setattr(overlaps, "_blocks", lambda conv, device: 1)


def launch_of(plan: ExecutionPlan) -> KernelCall:
    """The launch that is preferred."""
    (step,) = plan.steps
    (call,) = options_of(step)[0].calls
    assert isinstance(call, KernelCall)
    assert plan.kernels[call.kernel].entry == "conv2d_overlap"
    return call


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_compile(case: Case) -> None:
    plan = case.program.main
    check_compile([plan.kernels[launch_of(plan).kernel]], 90)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_on_the_processor_give_the_convolution(case: Case, tmp_path: Path) -> None:
    plan = case.program.main
    found = torch.from_numpy(run_on_host(plan, launch_of(plan), bytes_of(case), tmp_path).copy()).view(case.dtype)
    batch, _, height, width = case.module(case.image).shape
    case.check(found.reshape(batch, height, width, 64).permute(0, 3, 1, 2))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gives_what_pytorch_gives(case: Case, device: Device) -> None:
    program = case.program
    source = {name: value.float().numpy() for name, value in case.module.state_dict().items()}
    weights = load_weights(source, program, device)
    given = NPUBuffer.from_numpy(case.image.float().numpy(), device, spec=program.input_specs[0])
    (output,) = Executor(program, device).run({program.input_specs[0].name: given}, weights).values()
    case.check(torch.from_numpy(output.to_numpy(spec=program.output_specs[0]).astype(np.float32)))


def bytes_of(case: Case) -> dict[str, NDArray[np.uint8]]:
    """The input and the weights as they lie in memory, channels last."""
    weight, bias = (parameter.detach() for parameter in case.module[0].parameters())
    given = {"p_0_weight": weight.permute(0, 2, 3, 1), "p_0_bias": bias, "input": case.image.permute(0, 2, 3, 1)}
    return {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in given.items()}
