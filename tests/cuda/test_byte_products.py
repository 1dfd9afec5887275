"""Products of codes by codes on CUDA: that kernels compile, which one is taken, and on a device what they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import npu_compiler
from cuda_compiler.devices import DEVICES
from cuda_compiler.products import matmul
from cuda_compiler.products.bulk_tilings import BulkCosts, BulkTiling
from cuda_compiler.products.byte_products import bulk_byte_tilings
from cuda_compiler.tiles.tiling import Asked, Tiling
from cuda_compiler.tiles.warps import WarpCosts
from npu_compiler.artifact.plan import CallOption, KernelCall
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_runtime import Device, load
from tests.cuda.kernels import check_plan_compiles, kernels_for
from tests.cuda.test_bulk_products import preferred
from tests.support.byte_products import KINDS, ByteProduct, codes_of
from tests.support.coded import kernels_of
from tests.support.host_kernels import HAS_COMPILER, run_on_host

Force = Callable[["BulkTiling | Tiling"], None]

MODEL = DEVICES.named("sm_90", "cuda")
TILINGS = [BulkTiling.of(tile, MODEL, tile.rows) for tile in BulkCosts.of(MODEL).tiles]
WARP_TILINGS = [tile.tiling for tile in WarpCosts.of(MODEL).tiles]
SIZES = [(66, 32, 16), (130, 224, 528), (300, 800, 1104), (517, 416, 80)]
BEHIND = ["", "residual", "gated", "bias"]
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Lets every product take one tiling, by the copy engine or by warps."""

    def use(tiling: BulkTiling | Tiling) -> None:
        def bulk(asked: Asked, device: DeviceModel, whole: bool) -> tuple[BulkTiling, ...]:
            if not isinstance(tiling, BulkTiling):
                return ()
            return (replace(tiling, splits=1 if whole else min(tiling.splits, ceil_div(asked.k, 64))),)

        monkeypatch.setattr(matmul, "bulk_byte_tilings", bulk)
        if isinstance(tiling, Tiling):
            monkeypatch.setattr(matmul, "close_tilings", lambda asked, device, warpgroups: (tiling,))

    return use


def check(model: ByteProduct, m: int, device: Device) -> CompiledProgram:
    """Compares with the exact product of the same codes: what is left is the rounding of results, and of the sums."""
    program = model.compiled(m)
    x, residual = model.inputs(m)
    given = load(program, model.state_dict(), device)(x, residual)
    result = torch.as_tensor(given[0] if isinstance(given, tuple) else given).double()
    expected = model.exact(x, residual)
    # tensor cores of 9.0 add products of fp8 with fewer bits than float32 has; those of int8 are exact
    largest, typical = (8e-3, 3e-3) if model.kind.is_floating_point else (2e-3, 2e-3)
    eps = torch.finfo(x.dtype).eps
    assert ((result - expected).abs() <= eps * expected.abs() + largest * expected.abs().max()).all()
    assert (result - expected).norm() <= (typical + eps) * expected.norm()
    return program


@each_kind
def test_large_products_go_to_the_copy_engine(kind: torch.dtype) -> None:
    plan = ByteProduct(224, 528, kind, torch.bfloat16, True, "residual").compiled(130).main
    assert kernels_of(plan)[0] == "scaled_rows"
    assert {kernel.entry for kernel in kernels_for(plan, 90)} == {"scaled_rows", "matmul_bulk", "matmul"}
    assert {kernel.entry for kernel in kernels_for(plan, 70)} == {"scaled_rows", "matmul"}
    assert preferred(plan) == ["matmul_bulk"]


@each_kind
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (8, 64, 128), (40, 64, 72)])
def test_what_is_not_multiplied_by_bytes_is_multiplied_by_halves(kind: torch.dtype, m: int, n: int, k: int) -> None:
    plan = ByteProduct(n, k, kind, torch.bfloat16, True).compiled(m).main
    assert "scaled_rows" not in kernels_of(plan)
    assert m <= 8 or any("dequantize" in note for note in plan.notes)


@each_kind
@pytest.mark.parametrize("architecture", [70, 75, 80, 89, 90])
def test_kernels_compile(kind: torch.dtype, architecture: int) -> None:
    dtype = torch.float16 if architecture < 80 else torch.bfloat16
    check_plan_compiles(ByteProduct(224, 528, kind, dtype, True, "gated").compiled(130).main, architecture)


@pytest.mark.parametrize("at", range(0, len(TILINGS), 5))
def test_tilings_compile(at: int, force: Force) -> None:
    force(TILINGS[at])
    kind = list(KINDS.values())[at % 2]
    check_plan_compiles(ByteProduct(224, 528, kind, torch.bfloat16, False, BEHIND[at % 4]).compiled(130).main, 90)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("m", [65, 128, 512, 2048, 8192])
@pytest.mark.parametrize(("n", "k"), [(17920, 1536), (1536, 8960), (2048, 1536), (32, 16)])
def test_chosen_tilings_are_sound(m: int, n: int, k: int, whole: bool) -> None:
    asked = Asked(m, n, k // 2)
    splits = [tiling.splits for tiling in bulk_byte_tilings(asked, MODEL, whole)]
    assert not whole or set(splits) == {1}


@each_kind
@pytest.mark.parametrize("tiling", [*TILINGS, *WARP_TILINGS], ids=repr)
def test_equals_the_exact_product(kind: torch.dtype, tiling: BulkTiling | Tiling, force: Force, device: Device) -> None:
    force(tiling)
    number = [*TILINGS, *WARP_TILINGS].index(tiling)
    m, n, k = SIZES[number % len(SIZES)]
    dtype = (torch.float16, torch.bfloat16)[number % 2]
    check(ByteProduct(n, k, kind, dtype, number % 3 == 0, BEHIND[number % 4]), m, device)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("k", "norm"), [(48, False), (528, True), (3104, True), (3104, False)])
def test_rows_are_rounded_on_the_processor(
    kind: torch.dtype, dtype: torch.dtype, k: int, norm: bool, tmp_path: Path
) -> None:
    model = ByteProduct(32, k, kind, dtype, norm)
    plan, (x, _) = model.compiled(1030).main, model.inputs(1030)
    (call,) = plan.steps[0].calls if isinstance(plan.steps[0], CallOption) else [plan.steps[0]]
    assert isinstance(call, KernelCall)
    assert plan.kernels[call.kernel].text.count("1.0f / ") == 1
    text = plan.kernels[call.kernel].text
    stored = " result[8]" if kind.is_floating_point else "Pack<int8, 8> result"
    assert text.index("1.0f / ") < text.index(stored)  # once for a row, not for each code
    named = {"x": x, "b_gain": model.gain}
    tensors = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in named.items()}
    arena = torch.from_numpy(run_on_host(plan, call, tensors, tmp_path).copy())
    scales, codes = (argument.offset for argument in call.args if argument.writes)
    expected, each = codes_of(model.numbers(x), kind)
    found = arena[codes : codes + expected.numel()].view(kind).reshape(expected.shape)
    error = (found.float() - expected.float()).abs()
    assert (error > 0).float().mean() < 1e-3  # numbers halfway between two codes
    assert torch.allclose(arena[scales : scales + each.numel() * 4].view(torch.float32), each.reshape(-1))


@each_kind
@pytest.mark.parametrize(("m", "n", "k"), [(12, 33, 48), (40, 1000, 8960), (512, 1536, 8960), (700, 2048, 1536)])
def test_chosen_kernels_give_the_exact_product(kind: torch.dtype, m: int, n: int, k: int, device: Device) -> None:
    for behind in BEHIND if n % 2 == 0 else [""]:
        check(ByteProduct(n, k, kind, torch.bfloat16, True, behind), m, device)


@each_kind
def test_linears_of_one_input_are_one_product_of_codes(kind: torch.dtype) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = ByteProduct(224, 528, kind, torch.bfloat16)
            self.second = ByteProduct(96, 528, kind, torch.bfloat16)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x, residual), self.second(x, residual)

    model = Two().eval()
    plan = npu_compiler.compile(npu_compiler.extract(model, model.first.inputs(130)), target="cuda").main
    assert kernels_of(plan)[0] == "scaled_rows"
    assert preferred(plan) == ["matmul_bulk"]
