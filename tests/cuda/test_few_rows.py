"""Products of a few rows on tensor cores: which sizes are candidates, and what they compute.

What a kernel computes is seen on this machine's processor, thread by thread, and where there is a GPU on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import npu_compiler
from cuda_compiler.devices import DEVICES
from cuda_compiler.products import few_rows
from cuda_compiler.products.few_rows_sizes import WARPS, FewRows, Work, few_rows_candidates
from npu_compiler import CompiledProgram
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel
from npu_runtime import Device, load
from tests.cuda.kernels import check_compile
from tests.support.host_kernels import HAS_COMPILER, run_on_host
from tests.support.ir_builder import IRBuilder

BFLOAT, HALF = torch.bfloat16, torch.float16
H200 = DEVICES.named("sm_90", "cuda")


@dataclass(frozen=True)
class Linear:
    """A linear of `m` rows by a weight [n, k], with a bias: behind a norm, ahead of a residual, gated, or alone."""

    m: int
    n: int
    k: int
    behind: str = ""

    def given(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Inputs and weights by name; the norm's, or what is added, among them where there is such a thing."""
        random = torch.Generator().manual_seed(self.n + self.k)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).to(dtype)

        weight = (made(self.n, self.k) / self.k**0.5).to(dtype)
        more = {"norm ahead": {"norm": made(self.k)}, "residual": {"y": made(self.m, self.n)}}
        return {"x": made(self.m, self.k), "w": weight, "bias": made(self.n)} | more.get(self.behind, {})

    def program(self, dtype: torch.dtype) -> CompiledProgram:
        builder = IRBuilder()
        x = builder.input("x", (self.m, self.k), dtype)
        if self.behind == "norm ahead":
            x = builder.call("aten.rms_norm.default", x, [self.k], builder.weight("norm", (self.k,), dtype), 1e-6)
        weight, bias = builder.weight("w", (self.n, self.k), dtype), builder.weight("bias", (self.n,), dtype)
        result = builder.call("aten.linear.default", x, weight, bias)
        if self.behind == "residual":
            result = builder.call("aten.add.Tensor", builder.input("y", (self.m, self.n), dtype), result)
        if self.behind == "gated":
            gates = builder.call("aten.slice.Tensor", result, 1, 0, self.n, 2)
            others = builder.call("aten.slice.Tensor", result, 1, 1, self.n, 2)
            result = builder.call("aten.mul.Tensor", builder.call("aten.silu.default", gates), others)
        return npu_compiler.compile(builder.build(result), "cuda", str(dtype).removeprefix("torch."))

    def exact(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        x, w, bias = (given[name].double() for name in ("x", "w", "bias"))
        if self.behind == "norm ahead":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * given["norm"].double()
        result = x @ w.T + bias
        if self.behind == "gated":
            return F.silu(result[:, ::2]) * result[:, 1::2]
        return result + given["y"].double() if self.behind == "residual" else result

    def check(self, result: torch.Tensor, given: dict[str, torch.Tensor]) -> None:
        """A result errs as rounding it does; with a norm or something behind, a few roundings."""
        exact = self.exact(given)
        rounded = (exact.to(given["x"].dtype).double() - exact).norm()
        assert (result.double() - exact).norm() <= (2.5 if self.behind else 1.3) * rounded


FORCED: list[tuple[Linear, torch.dtype, FewRows]] = [
    (Linear(8, 50, 1536), BFLOAT, FewRows(1, 1, 3, 2)),
    (Linear(7, 40, 360), HALF, FewRows(1, 1, 4, 2)),
    (Linear(3, 100, 1544, "residual"), BFLOAT, FewRows(3, 4, 2, 1)),
    (Linear(6, 36, 264, "norm ahead"), BFLOAT, FewRows(2, 1, 4, 1)),
    (Linear(5, 84, 768, "gated"), HALF, FewRows(1, 1, 2, 2)),
    (Linear(8, 70, 2048, "gated"), BFLOAT, FewRows(2, 2, 1, 2)),
    (Linear(2, 70, 320, "norm ahead"), HALF, FewRows(4, 1, 1, 1)),
    (Linear(16, 50, 520), HALF, FewRows(1, 1, 2, 2)),
    (Linear(11, 70, 1032, "gated"), BFLOAT, FewRows(2, 2, 2, 1)),
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
    case: Linear, dtype: torch.dtype, sizes: FewRows, force: Any, tmp_path: Path
) -> None:
    force(sizes)
    given, plan = case.given(dtype), case.program(dtype).main
    named = {name if name in ("x", "y") else f"p_{name}": tensor for name, tensor in given.items()}
    tensors = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in named.items()}
    found = run_on_host(plan, launch_of(plan), tensors, tmp_path)
    case.check(torch.from_numpy(found.copy()).view(dtype).reshape(case.exact(given).shape), given)


@pytest.mark.parametrize("architecture", [80, 90])
def test_kernels_compile(architecture: int, force: Any) -> None:
    kernels = []
    for case, dtype, sizes in FORCED[architecture // 10 % 2 :: 2]:
        if architecture >= 90 or sizes.cluster == 1:
            force(sizes)
            plan = case.program(dtype).main
            kernels.append(plan.kernels[launch_of(plan).kernel])
    check_compile(kernels, architecture)


WORKS = [
    Work(rows, outputs, k, is_computed)
    for rows in (2, 8, 16)
    for outputs, k in ((2048, 1536), (1536, 8960), (151936, 1536), (17, 64))
    for is_computed in (False, True)
]


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_90_h100"])
def test_candidates_fit_and_take_as_long_as_their_bytes(name: str) -> None:
    device = DEVICES.named(name, "cuda")
    for work in WORKS:
        found = [*few_rows_candidates(work, device)]
        floor = work.outputs * work.k * 2 / device.memory_gbs / 1e3
        for each in found:
            sizes = each.sizes
            assert each.microseconds > floor
            assert sizes.shared_bytes(work, 2) <= device.shared_bytes
            assert sizes.clusters(work, device) > 0
            assert bool(each.requires) == (sizes.cluster > 1)
        assert found or work.rows * work.k > 16 * 1536


def test_clusters_share_a_matrix_of_few_long_rows() -> None:
    best = min(few_rows_candidates(Work(8, 1536, 8960, False), H200), key=lambda each: each.microseconds)
    assert best.sizes.cluster > 1
    assert best.sizes.clusters(Work(8, 1536, 8960, False), H200) * best.sizes.cluster > 66


def test_a_long_stream_has_more_on_its_way_than_just_enough() -> None:
    best = min(few_rows_candidates(Work(8, 151936, 1536, True), H200), key=lambda each: each.microseconds).sizes
    assert best.resident * best.depth * best.tiles * 16 * 2 * 32 * WARPS >= 48 * 1024


@pytest.mark.parametrize("m", [2, 5, 8])
def test_rows_of_a_norm_are_computed_with_the_product(m: int) -> None:
    plan = Linear(m, 2048, 1536, "norm ahead").program(BFLOAT).main
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
    case: Linear, dtype: torch.dtype, sizes: FewRows, force: Any, device: Device
) -> None:
    force(sizes)
    given = case.given(dtype)
    weights = {name: tensor for name, tensor in given.items() if name not in ("x", "y")}
    inputs = {name: tensor for name, tensor in given.items() if name in ("x", "y")}
    case.check(load(case.program(dtype), weights, device)(**inputs).cpu(), given)
