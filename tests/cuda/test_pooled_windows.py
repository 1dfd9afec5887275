"""Max pooling inside of a convolution of few channels: when it is one launch, and what that computes.

What a kernel computes is seen on this machine's processor, thread by thread, and where there is a GPU on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.images import pooled_windows
from npu_compiler.artifact.plan import CallOption, ExecutionPlan, KernelCall, Step, options_of
from npu_compiler.compiled_program import CompiledProgram
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.cuda.kernels import check_compile
from tests.support.host_kernels import HAS_COMPILER, run_on_host
from tests.support.ir_builder import IRBuilder


@dataclass(frozen=True)
class Case:
    """A convolution of stride 2, ReLU, and max pooling of stride 2."""

    size: tuple[int, int]
    channels: int = 3
    outputs: int = 64
    taps: int = 7
    padding: int = 3
    window: int | tuple[int, int] = 3
    pool_padding: int = 1
    batch: int = 1
    dtype: torch.dtype = torch.float16

    @property
    def module(self) -> torch.nn.Sequential:
        torch.manual_seed(0)
        conv = torch.nn.Conv2d(self.channels, self.outputs, self.taps, 2, self.padding)
        pool = torch.nn.MaxPool2d(self.window, 2, self.pool_padding)
        return torch.nn.Sequential(conv, torch.nn.LeakyReLU(0.5), pool).eval().to(self.dtype)

    @property
    def image(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, self.channels, *self.size, generator=generator).to(self.dtype)

    @property
    def ir(self) -> dict[str, Any]:
        return npu_compiler.extract(self.module, self.image, model_name="pooled").ir

    @property
    def program(self) -> CompiledProgram:
        return npu_compiler.compile(self.ir, target="cuda")

    def expected(self) -> torch.Tensor:
        """In float64, but for the rounding of what is compared, which keeps the order."""
        with torch.inference_mode():
            expected: torch.Tensor = self.module.double()(self.image.double())
        return expected


CASES = [
    Case((64, 64)),
    Case((61, 77), batch=2),
    Case((40, 50), window=2, pool_padding=0),
    Case((38, 64), window=(2, 3)),
    Case((64, 48), channels=4, outputs=56, taps=3, padding=1, dtype=torch.bfloat16),
    Case((96, 33), channels=2, outputs=16, taps=5, padding=0, pool_padding=0),
]


@pytest.fixture(autouse=True)
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets few tiles be enough."""
    monkeypatch.setattr(pooled_windows._Costs, "of", lambda device: pooled_windows._Costs(2, 0))


def joined(plan: ExecutionPlan) -> CallOption:
    """The one step's preferred way."""
    (step,) = plan.steps
    return options_of(step)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_are_one_launch_where_warpgroups_multiply(case: Case) -> None:
    plan = case.program.main
    ways = options_of(plan.steps[0])
    entries = [[plan.kernels[call.kernel].entry for call in way.calls if isinstance(call, KernelCall)] for way in ways]
    assert (ways[0].requires, entries[0]) == (WARPGROUPS, ["conv2d_window_pool"])
    assert all(names[-1] == "pool2d" for names in entries[1:])
    assert any(not way.requires for way in ways)
    check_compile([plan.kernels[call.kernel] for call in ways[0].calls if isinstance(call, KernelCall)], 90)


@pytest.mark.parametrize(
    "change",
    [
        torch.nn.MaxPool2d(3, 1, 1),
        torch.nn.MaxPool2d(4, 2, 1),
        torch.nn.MaxPool2d(2, 2, dilation=2),
        torch.nn.AvgPool2d(2, 2),
        torch.nn.AdaptiveMaxPool2d(8),
    ],
    ids=str,
)
def test_other_poolings_are_launches_of_their_own(change: torch.nn.Module) -> None:
    case = Case((64, 64))
    ir = npu_compiler.extract(
        torch.nn.Sequential(case.module[0], case.module[1], change).float().eval(), case.image.float()
    ).ir
    assert len(npu_compiler.compile(ir, target="cuda").main.steps) == 2


def test_a_line_that_is_pooled_as_an_image_is_stored() -> None:
    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = torch.nn.Conv1d(3, 64, 7, 2, 3), torch.nn.MaxPool2d((2, 2), 2, (1, 0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pooled: torch.Tensor = self.pool(self.conv(x).unsqueeze(2))
            return pooled

    plan = npu_compiler.compile(npu_compiler.extract(Line().eval(), torch.zeros(2, 3, 512)).ir, target="cuda").main
    assert [plan.kernels[call.kernel].entry for call in _calls(plan.steps[-1])] == ["pool2d"]


def test_few_tiles_are_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plan = CASES[0].program.main
    assert [[plan.kernels[call.kernel].entry for call in _calls(step)] for step in plan.steps] == [
        ["conv2d_window"],
        ["pool2d"],
    ]
    large = npu_compiler.compile(Case((224, 224), batch=16).ir, target="cuda").main
    assert [large.kernels[call.kernel].entry for call in _calls(large.steps[0])] == ["conv2d_window_pool"]


def _calls(step: Step) -> list[KernelCall]:
    """Those of the preferred way."""
    return [call for call in options_of(step)[0].calls if isinstance(call, KernelCall)]


def test_results_that_others_read_are_stored() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.pool = Case((64, 64)).module.float()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            wide = self.act(self.conv(x))
            return self.pool(wide), wide.mean((2, 3))

    ir = npu_compiler.extract(Twice().eval(), Case((64, 64)).image.float()).ir
    plan = npu_compiler.compile(ir, target="cuda").main
    entries = {kernel.entry for kernel in plan.kernels}
    assert "conv2d_window" in entries
    assert "conv2d_window_pool" not in entries


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_on_the_processor_give_the_maxima(case: Case, tmp_path: Path) -> None:
    program = case.program
    (call,) = joined(program.main).calls
    assert isinstance(call, KernelCall)
    tensors = bytes_of(case)
    expected = case.expected().permute(0, 2, 3, 1)
    found = torch.from_numpy(run_on_host(program.main, call, tensors, tmp_path).copy()).view(case.dtype)
    _check(found.reshape(expected.shape), expected, case)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("case", CASES[-2:], ids=str)
def test_the_convolution_alone(case: Case, tmp_path: Path) -> None:
    module = torch.nn.Sequential(case.module[0], case.module[1]).eval()
    program = npu_compiler.compile(npu_compiler.extract(module, case.image, model_name="alone").ir, target="cuda")
    (call,) = joined(program.main).calls
    assert isinstance(call, KernelCall)
    assert program.main.kernels[call.kernel].entry == "conv2d_window"
    found = run_on_host(program.main, call, bytes_of(case), tmp_path)
    with torch.inference_mode():
        expected = module.double()(case.image.double()).permute(0, 2, 3, 1)
    _check(torch.from_numpy(found.copy()).view(case.dtype).reshape(expected.shape), expected, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gives_what_pytorch_gives(case: Case, device: Device) -> None:
    program = case.program
    weights = load_weights(
        {name: value.float().numpy() for name, value in case.module.state_dict().items()}, program, device
    )
    given = NPUBuffer.from_numpy(case.image.float().numpy(), device, spec=program.input_specs[0])
    (output,) = Executor(program, device).run({program.input_specs[0].name: given}, weights).values()
    _check(torch.from_numpy(output.to_numpy(spec=program.output_specs[0]).astype(np.float32)), case.expected(), case)


def bytes_of(case: Case) -> dict[str, NDArray[np.uint8]]:
    """The inputs and weights as they lie in memory: channels last, those of the weights filled up to four."""
    weight, bias = (parameter.detach() for parameter in case.module[0].parameters())
    taps = torch.nn.functional.pad(weight, (0, case.taps % 2, 0, 0, 0, 4 - case.channels)).permute(0, 2, 3, 1)
    image = case.image.permute(0, 2, 3, 1)
    given = {"p_0_weight": taps, "p_0_bias": bias, "input": image}
    return {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in given.items()}


def _check(found: torch.Tensor, expected: torch.Tensor, case: Case) -> None:
    """Products are summed in float32; results are rounded once."""
    step = torch.finfo(case.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=1.1 * step / 2, atol=3 * step * 2**-4)


def _codes(dtype: torch.dtype) -> CompiledProgram:
    """A convolution and its maxima, rounded to codes of a byte."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    case, builder = Case((64, 64)), IRBuilder()
    image = builder.input("input", case.image.shape, torch.float16)
    weight, bias = (
        builder.weight("0.weight", (64, 3, 7, 7), torch.float16),
        builder.weight("0.bias", (64,), torch.float16),
    )
    wide = builder.call("aten.conv2d.default", image, weight, bias, [2, 2], [3, 3])
    pooled = builder.call("aten.max_pool2d.default", wide, [3, 3], [2, 2], [1, 1])
    codes = builder.call(
        "quantized_decomposed.quantize_per_tensor.default", pooled, 0.0127, low + 100, low, high, dtype
    )
    return npu_compiler.compile(builder.build(codes), target="cuda")


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_maxima_of_codes(dtype: torch.dtype, tmp_path: Path) -> None:
    program, case = _codes(dtype), Case((64, 64))
    (call,) = joined(program.main).calls
    assert isinstance(call, KernelCall)
    assert program.main.kernels[call.kernel].entry == "conv2d_window_pool"
    found = torch.from_numpy(run_on_host(program.main, call, bytes_of(case), tmp_path).copy()).view(dtype)
    module = torch.nn.Sequential(case.module[0], case.module[2]).double()
    with torch.inference_mode():
        exact = module(case.image.double()).permute(0, 2, 3, 1)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    expected = (exact / 0.0127 + low + 100).round().clamp(low, high)
    difference = (found.reshape(expected.shape).double() - expected).abs()
    assert difference.max() <= 1  # where a sum is as near to one code as to the next
    assert (difference > 0).double().mean() < 0.01
    assert expected.unique().numel() > 100
