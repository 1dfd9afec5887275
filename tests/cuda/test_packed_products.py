"""Products of many rows by packed codes on CUDA: that kernels compile, and on a device what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import npu_compiler
import npu_compiler.frontend.coded_layers
from cuda_compiler.artifact.vocabulary import WARPGROUPS
from cuda_compiler.products import coded_rows
from cuda_compiler.products.coded_rows_sizes import ByWarpgroups, CodedRows, Work
from npu_compiler.artifact.plan import KernelCall, options_of
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel
from npu_runtime import Device, load
from tests.cuda.kernels import check_plan_compiles, kernels_for
from tests.support.host_kernels import HAS_COMPILER, run_on_host

SIZES = [
    ByWarpgroups(0, 1, groups, most, places)
    for groups, most in ((3, 64), (2, 128), (1, 128), (2, 192), (2, 256))
    for places in (64, 128)
]


@dataclass(frozen=True)
class Form:
    """How codes are stored."""

    bits: int = 4
    group: int = 64
    zeros: bool = False
    biases: bool = False
    codebook: bool = False
    scale: torch.dtype = torch.bfloat16
    kind: torch.dtype = torch.uint8


FORMS = {
    "int4": Form(),
    "int4 with zeros": Form(zeros=True, group=32),
    "int4 with biases": Form(biases=True, group=128),
    "int4 of float32 scales": Form(scale=torch.float32),
    "nf4": Form(codebook=True),
    "int8": Form(bits=8, kind=torch.int8, group=128),
    "fp8": Form(bits=8, kind=torch.float8_e4m3fn, group=128, scale=torch.float32),
}


class PackedProduct(torch.nn.Module):
    """``silu(x @ numbers(codes).T)``."""

    codes: Tensor
    scales: Tensor

    def __init__(self, n: int, k: int, form: Form, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.form, self.dtype, self.columns = form, dtype, k
        random = torch.Generator().manual_seed(n + k)
        groups = k // form.group

        def numbers(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=random)

        def integers(*shape: int) -> Tensor:
            return torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)

        codes = integers(n, k * form.bits // 8)
        if form.kind == torch.float8_e4m3fn:
            codes = (codes.view(torch.int8).float() / 16).to(form.kind)
        scale = form.scale if form.scale == torch.float32 else dtype
        self.register_buffer("codes", codes if codes.dtype == form.kind else codes.view(form.kind))
        self.register_buffer("scales", (numbers(n, groups) / 64 + 0.01).to(scale))
        if form.zeros:
            self.register_buffer("zeros", integers(n, (groups * form.bits + 7) // 8))
        if form.biases:
            self.register_buffer("biases", (numbers(n, groups) / 8).to(dtype))
        if form.codebook:
            self.register_buffer("entries", torch.randn(16, generator=random))

    def inputs(self, m: int) -> Tensor:
        return torch.randn(m, self.columns, generator=torch.Generator().manual_seed(m)).to(self.dtype)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """What codes stand for, [n, k]; computed in float64 where they are of that type."""
        scales = self.scales.double() if dtype == torch.float64 else self.scales
        plain = self.form.codebook or self.form.kind != torch.uint8
        parts = (getattr(self, name, None) for name in ("zeros", "biases", "entries"))
        made: Tensor = torch.ops.npu_codes.dequantize(
            *(self.codes, scales, *parts, self.form.bits, self.columns, self.form.group),
            *(1, 0 if plain else 8, dtype),
        )
        return made

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(F.linear(x, self.numbers(x.dtype)))

    def compiled(self, m: int) -> CompiledProgram:
        return npu_compiler.compile(npu_compiler.extract(self.eval(), (self.inputs(m),)), target="cuda")


Force = Callable[[ByWarpgroups], None]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Force]:
    """Lets every product be shared in one way, where that has room for enough stages."""

    def use(sizes: ByWarpgroups) -> None:
        def only(work: Work, device: DeviceModel) -> Iterator[Candidate[CodedRows]]:
            filled = sizes.filling(work, device)
            if filled is not None:
                yield Candidate("coded_rows", filled, 1.0, WARPGROUPS)

        coded_rows._ranked.cache_clear()
        monkeypatch.setattr(coded_rows, "coded_rows_candidates", only)

    yield use
    coded_rows._ranked.cache_clear()


def check(model: PackedProduct, m: int, device: Device) -> None:
    """Compares with float64: what is left is the rounding of each number, of the sums and of the result."""
    x = model.inputs(m)
    given = load(model.compiled(m), model.state_dict(), device)(x)
    result = torch.as_tensor(given[0] if isinstance(given, tuple) else given).double()
    expected = model(x.double())
    assert (result - expected).norm() <= 1.5 * torch.finfo(x.dtype).eps * expected.norm()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_numbers_are_made_in_registers(form: Form) -> None:
    plan = PackedProduct(160, 384, form).compiled(130).main
    assert "warpgroup_codes" in {kernel.entry for kernel in kernels_for(plan, 90)}
    assert {kernel.entry for kernel in kernels_for(plan, 80)} == {"code_numbers", "matmul"}
    check_plan_compiles(plan, 90)


class ToCodes(PackedProduct):
    """The same, rounded to codes of a byte."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * 8).round().clamp(-128, 127).to(torch.int8)


@pytest.mark.parametrize("m", [40, 130])
def test_results_may_be_bytes(m: int) -> None:
    """What makes packs of bytes once had a function of the name of one that makes numbers of codes."""
    plan = ToCodes(160, 384, FORMS["int4"]).compiled(m).main
    assert any("pack_of_bytes" in kernel.text for kernel in plan.kernels if kernel.entry == "warpgroup_codes")
    check_plan_compiles(plan, 90)


def test_groups_that_do_not_fit_a_step_go_another_way() -> None:
    model = PackedProduct(160, 416, replace(FORMS["int4"], group=52))
    assert "warpgroup_codes" not in {kernel.entry for kernel in model.compiled(130).main.kernels}


def test_numbers_are_made_ahead_where_many_rows_read_them() -> None:
    """As found on an H200: 2048 rows by gate and up of Qwen2.5-1.5B take longer where each tile makes numbers."""
    plan = PackedProduct(17920, 1536, FORMS["int4"]).compiled(2048).main
    ways = [
        [plan.kernels[call.kernel].entry for call in option.calls if isinstance(call, KernelCall)]
        for option in options_of(plan.steps[0])
    ]
    assert ways[0][0] == "code_numbers"
    assert ["warpgroup_codes"] in ways


def made_on_the_processor(model: PackedProduct, tmp_path: Path) -> Tensor:
    """What the kernel makes of a model's codes, [n, k]. The plan keeps scales in 16 bits; so does the model then."""
    plan, stored = model.compiled(130).main, dict(model.named_buffers())
    if model.scales.dtype == torch.float32:
        stored["scales"] = model.scales.half()
        model.scales = stored["scales"].float()
    calls = [call for step in plan.steps for option in options_of(step) for call in option.calls]
    kernels = [call for call in calls if isinstance(call, KernelCall)]
    call = next(call for call in kernels if plan.kernels[call.kernel].entry == "code_numbers")
    tensors = {f"b_{name}": part.view(torch.uint8).numpy() for name, part in stored.items()}
    n, k = len(model.codes), model.columns
    made = run_on_host(plan, call, tensors, tmp_path)[: n * k * model.dtype.itemsize].copy()
    return torch.from_numpy(made).view(model.dtype).view(n, k)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_numbers_on_the_processor_are_rounded_once(form: Form, dtype: torch.dtype, tmp_path: Path) -> None:
    """But for those of a codebook, which are rounded before their scale as well."""
    model = PackedProduct(41, 384, form, dtype)
    found = made_on_the_processor(model, tmp_path)
    exact = model.numbers(torch.float64)
    if form.codebook:
        assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs()).all()
    else:
        assert found.equal(exact.to(dtype))


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("k", "form"),
    [
        (96, Form(group=32, zeros=True)),
        (416, Form(group=416)),
        (448, Form(group=448, bits=8, kind=torch.int8)),
        (160, Form(group=32, bits=8, zeros=True)),
        (32, Form(group=32, biases=True)),
    ],
    ids=str,
)
def test_numbers_of_rows_that_are_no_whole_spans(k: int, form: Form, dtype: torch.dtype, tmp_path: Path) -> None:
    """A thread makes two octets of a group, or four; rows end within a block of threads."""
    model = PackedProduct(37, k, form, dtype)
    found = made_on_the_processor(model, tmp_path)
    assert found.equal(model.numbers(torch.float64).to(dtype))


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(torch.bfloat16, (1e-39, 1e-30, 1e30)), (torch.float16, (1e-7, 1e-3, 1e3))],
    ids=["bfloat16", "float16"],
)
def test_numbers_of_small_and_large_scales(dtype: torch.dtype, sizes: tuple[float, ...], tmp_path: Path) -> None:
    """Codes are subnormal numbers on their way in bfloat16; results may be, in both types."""
    model = PackedProduct(12, 384, FORMS["int4 with zeros"], dtype)
    random = torch.rand(model.scales.shape, generator=torch.Generator().manual_seed(3))
    model.scales = (random + 1).mul(torch.tensor(sizes).repeat(4)).to(dtype)
    found = made_on_the_processor(model, tmp_path)
    assert found.equal(model.numbers(torch.float64).to(dtype))


@pytest.mark.parametrize(
    ("sizes", "early"),
    [
        ((64, 128, 192, 64, 128, 192), [False, False, False, True, True]),
        ((128, 64, 64, 64), [False, False, False]),
    ],
)
def test_numbers_are_made_ahead_of_the_end_of_launches_that_do_not_read_their_place(
    sizes: tuple[int, ...], early: list[bool]
) -> None:
    """All matrices of a size have one place; the first of them waits for whoever had that memory before."""
    layers = [PackedProduct(n, k, FORMS["int4"]) for k, n in pairwise(sizes)]
    model = torch.nn.Sequential(*layers).eval()
    plan = npu_compiler.compile(npu_compiler.extract(model, (layers[0].inputs(130),)), target="cuda").main
    found, places = list[bool](), set[tuple[int, int]]()
    for step in plan.steps:
        calls = [call for option in options_of(step) for call in option.calls if isinstance(call, KernelCall)]
        call, *others = [call for call in calls if plan.kernels[call.kernel].entry == "code_numbers"]
        assert all(each.args == call.args for each in others)
        found.append("#define EARLY 1" in plan.kernels[call.kernel].text)
        places |= {(argument.buffer, argument.offset) for argument in call.args if argument.writes}
    assert found == early
    assert len(places) == len(set(pairwise(sizes)))


@pytest.mark.parametrize("architecture", [70, 80])
def test_other_devices_make_numbers_first(architecture: int) -> None:
    dtype = torch.float16 if architecture == 70 else torch.bfloat16
    check_plan_compiles(PackedProduct(160, 384, FORMS["int4"], dtype).compiled(130).main, architecture)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("m", "n", "k"), [(66, 32, 128), (300, 800, 1536), (130, 1536, 8960)])
def test_equals_float64(form: Form, m: int, n: int, k: int, device: Device) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check(PackedProduct(n, k, form, dtype), m, device)


@pytest.mark.parametrize("sizes", SIZES, ids=repr)
@pytest.mark.parametrize("form", ["int4 with zeros", "int8"])
def test_every_way_equals_float64(sizes: ByWarpgroups, form: str, force: Force, device: Device) -> None:
    force(sizes)
    check(PackedProduct(609, 1536, FORMS[form]), 517, device)
