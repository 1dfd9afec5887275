"""Products of a few rows on tensor cores: which sizes are candidates, and what they compute.

What a kernel computes is seen on this machine's processor, thread by thread, and where there is a GPU on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from cuda_compiler.devices import DEVICES
from cuda_compiler.products import few_rows
from cuda_compiler.products.few_rows_sizes import FewRows, Work, few_rows_candidates
from npu_compiler import CompiledProgram
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel
from npu_runtime import Device, load
from tests.cuda.kernels import check_compile
from tests.cuda.test_grouped_matvec import Case as Coded
from tests.cuda.test_grouped_matvec import _inputs as inputs_of_codes
from tests.support.host_kernels import HAS_COMPILER, run_on_host
from tests.support.ir_builder import IRBuilder

BFLOAT, HALF = torch.bfloat16, torch.float16
H200 = DEVICES.named("sm_90", "cuda")


@dataclass(frozen=True)
class Plain:
    """A linear of `m` rows by a weight [n, k] of numbers, with a bias, behind a norm or not."""

    m: int
    n: int
    k: int
    behind: str = ""

    def parts(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(self.n + self.k)
        weight = torch.randn(self.n, self.k, generator=random) / self.k**0.5
        return {"w": weight.to(dtype), "bias": torch.randn(self.n, generator=random).to(dtype)}

    def program(self, dtype: torch.dtype) -> CompiledProgram:
        builder = IRBuilder()
        x = builder.input("x", (self.m, self.k), dtype)
        if self.behind == "norm ahead":
            x = builder.call("aten.rms_norm.default", x, [self.k], builder.weight("norm", (self.k,), dtype), 1e-6)
        weight, bias = builder.weight("w", (self.n, self.k), dtype), builder.weight("bias", (self.n,), dtype)
        result = builder.call("aten.linear.default", x, weight, bias)
        return npu_compiler.compile(builder.build(result), "cuda", str(dtype).removeprefix("torch."))

    def exact(self, parts: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor, norm: torch.Tensor) -> Any:
        x = x.double()
        if self.behind == "norm ahead":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.double()
        return x @ parts["w"].double().T + parts["bias"].double(), None


FORCED: list[tuple[Plain | Coded, torch.dtype, FewRows]] = [
    (Plain(8, 50, 1536), BFLOAT, FewRows(1, 8, 1, 3, 2)),
    (Plain(20, 40, 360), HALF, FewRows(1, 2, 1, 4, 2)),
    (Plain(3, 100, 1544), BFLOAT, FewRows(3, 8, 4, 2, 1)),
    (Plain(13, 36, 264, "norm ahead"), BFLOAT, FewRows(2, 1, 1, 4, 1)),
    (Coded(m=8, n=100, k=1536, zeros=True, behind="residual"), BFLOAT, FewRows(2, 8, 2, 2, 2)),
    (Coded(m=5, n=34, k=768, group=768, zero=8, behind="gated"), HALF, FewRows(1, 4, 1, 2, 2)),
    (Coded(m=9, n=70, k=2048, group=128, zero=8), BFLOAT, FewRows(1, 8, 2, 1, 2)),
    (Coded(m=8, n=40, k=640, bits=8, kind=torch.int8, group=640, behind="norm ahead"), HALF, FewRows(1, 8, 1, 1, 2)),
    (Coded(m=2, n=70, k=1536, bits=8, kind=torch.float8_e4m3fn, group=128, rows=128), BFLOAT, FewRows(4, 8, 1, 3, 1)),
    (Coded(m=4, n=33, k=512, codebook=True), BFLOAT, FewRows(1, 2, 1, 3, 2)),
]
"""Among them tiles in turns, clusters whose last blocks have less to do, and rows that end within a span."""


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes sizes the only candidate, and two clusters all that a launch has."""

    def forced(sizes: FewRows) -> None:
        few_rows._ranked.cache_clear()

        def only(work: Work, device: DeviceModel) -> Iterator[Candidate[FewRows]]:
            yield Candidate("few_rows", sizes, 1.0, "sm_90" if sizes.cluster > 1 else "")

        monkeypatch.setattr(few_rows, "few_rows_candidates", only)
        monkeypatch.setattr(FewRows, "clusters", lambda self, work, device: min(2, self.results(work)))

    yield forced
    few_rows._ranked.cache_clear()


def launch_of(plan: ExecutionPlan) -> KernelCall:
    """The launch of few rows that a plan prefers."""
    (option,) = [option for step in plan.steps for option in options_of(step)[:1]]
    (call,) = option.calls
    assert isinstance(call, KernelCall)
    assert plan.kernels[call.kernel].entry == "few_rows"
    return call


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(("case", "dtype", "sizes"), FORCED, ids=str)
def test_threads_on_the_processor_give_the_product(
    case: Plain | Coded, dtype: torch.dtype, sizes: FewRows, force: Any, tmp_path: Path
) -> None:
    force(sizes)
    parts, (x, y, norm) = case.parts(dtype), _inputs(case, dtype)
    plan = case.program(dtype).main
    exact, _ = case.exact(parts, x, y, norm)
    given = {f"p_{name}": part for name, part in (parts | {"norm": norm}).items()} | {"x": x, "y": y}
    tensors = {name: part.contiguous().view(torch.uint8).numpy() for name, part in given.items()}
    found = run_on_host(plan, launch_of(plan), tensors, tmp_path)
    result = torch.from_numpy(found.copy()).view(dtype).double().reshape(exact.shape)
    rounded = float((exact.to(dtype).double() - exact).norm() / exact.norm())
    assert float((result - exact).norm() / exact.norm()) <= (2.0 if case.behind else 1.3) * rounded


def _inputs(case: Plain | Coded, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return inputs_of_codes(case, dtype)


@pytest.mark.parametrize("architecture", [70, 80, 90])
def test_kernels_compile(architecture: int, force: Any) -> None:
    kernels, chosen = [], FORCED[architecture // 10 % 3 :: 2] if architecture >= 80 else FORCED[5:6]
    for case, dtype, sizes in chosen:  # without tensor cores, which no plan asks of it, they take NVRTC long
        if architecture >= 90 or sizes.cluster == 1:
            force(sizes)
            plan = case.program(HALF if architecture == 70 else dtype).main
            kernels.append(plan.kernels[launch_of(plan).kernel])
    check_compile(kernels, architecture)


WORKS = [
    Work(rows, outputs, k, bits, chunk, group, is_computed)
    for rows in (1, 2, 8, 16, 32)
    for outputs, k in ((2048, 1536), (1536, 8960), (151936, 1536), (17, 64))
    for bits, chunk, group in ((16, 8, 0), (8, 16, 0), (4, 16, 64))
    for is_computed in (False, True)
]


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_90_h100"])
def test_candidates_fit_and_take_as_long_as_their_bytes(name: str) -> None:
    device = DEVICES.named(name, "cuda")
    for work in WORKS:
        found = [*few_rows_candidates(work, device)]
        floor = work.outputs * work.k * work.bits / 8 / device.memory_gbs / 1e3
        for each in found:
            sizes = each.sizes
            assert each.microseconds > floor
            assert sizes.shared_bytes(work, 2) <= device.shared_bytes
            assert sizes.clusters(work, device) > 0
            assert bool(each.requires) == (sizes.cluster > 1)
        assert found or work.rows * work.k > 16 * 1536


def test_clusters_share_a_matrix_of_few_long_rows() -> None:
    best = min(few_rows_candidates(Work(8, 1536, 8960, 16, 8, 0, False), H200), key=lambda each: each.microseconds)
    assert best.sizes.cluster > 1
    assert best.sizes.clusters(Work(8, 1536, 8960, 16, 8, 0, False), H200) * best.sizes.cluster > 66


@pytest.mark.parametrize("m", [2, 8, 16])
def test_rows_of_a_norm_are_computed_with_the_product(m: int) -> None:
    plan = Plain(m, 2048, 1536, "norm ahead").program(BFLOAT).main
    (step,) = plan.steps
    first, *_, last = options_of(step)
    assert [plan.kernels[call.kernel].entry for call in first.calls] == ["few_rows"]  # type: ignore[union-attr]
    assert plan.kernels[last.calls[0].kernel].entry == "rows"  # type: ignore[union-attr]
    assert not last.requires


@pytest.mark.parametrize("m", [2, 8])
def test_old_devices_keep_their_kernel(m: int) -> None:
    builder = IRBuilder()
    x, weight = builder.input("x", (m, 512), HALF), builder.weight("w", (512, 512), HALF)
    ir = builder.build(builder.call("aten.linear.default", x, weight))
    plan = npu_compiler.compile(ir, "cuda", "float16", device="sm_70").main
    assert {kernel.entry for kernel in plan.kernels} == {"matvec"}


@pytest.mark.parametrize(("case", "dtype", "sizes"), FORCED, ids=str)
def test_error_is_that_of_rounding(
    case: Plain | Coded, dtype: torch.dtype, sizes: FewRows, force: Any, device: Device
) -> None:
    force(sizes)
    parts, (x, y, norm) = case.parts(dtype), _inputs(case, dtype)
    exact, _ = case.exact(parts, x, y, norm)
    weights = {**parts, **({"norm": norm} if case.behind == "norm ahead" else {})}
    inputs = {"x": x} | ({"y": y} if case.behind == "residual" else {})
    result = np.asarray(load(case.program(dtype), weights, device)(**inputs).float().cpu()).astype(np.float64)
    wanted = exact.numpy()
    rounded = np.linalg.norm(exact.to(dtype).double().numpy() - wanted) / np.linalg.norm(wanted)
    assert np.linalg.norm(result - wanted) / np.linalg.norm(wanted) <= (3.0 if case.behind else 1.3) * rounded + 1e-6
