"""Products of many rows by packed codes: which sizes are candidates, and what they compute.

What a kernel computes is seen on this machine's processor, thread by thread, and where there is a GPU on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_compiler.artifact.vocabulary import CLUSTERS, WARPGROUPS
from cuda_compiler.devices import DEVICES
from cuda_compiler.products import coded_rows
from cuda_compiler.products.coded_rows_sizes import ByWarpgroups, ByWarps, CodedRows, Work, coded_rows_candidates
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel
from npu_runtime import Device
from tests.cuda.kernels import check_compile
from tests.cuda.test_grouped_matvec import HALVES, Case, errors, inputs_of
from tests.support.host_kernels import HAS_COMPILER, run_on_host

BFLOAT, HALF = torch.bfloat16, torch.float16
H200 = DEVICES.named("sm_90", "cuda")

FORCED: list[tuple[Case, torch.dtype, CodedRows]] = [
    (Case(17, 50, 384, 8, 384, torch.int8), BFLOAT, ByWarps(3, 1, 1, 4)),
    (Case(64, 160, 416, 8, 416, torch.int8, behind="residual"), BFLOAT, ByWarps(3, 2, 2, 2)),
    (Case(33, 100, 640, 4, 64, zeros=True), HALF, ByWarps(4, 3, 4, 1)),
    (Case(40, 136, 288, 4, 32, zero=8, behind="gated"), BFLOAT, ByWarps(3, 1, 2, 2)),
    (Case(24, 70, 256, 4, 128, codebook=True), BFLOAT, ByWarps(3, 1, 1, 4)),
    (Case(20, 64, 512, 8, 128, torch.float8_e4m3fn, rows=128), HALF, ByWarps(3, 2, 2, 2)),
    (Case(50, 48, 320, 8, 32, torch.int8, biases=True), BFLOAT, ByWarps(3, 1, 4, 1)),
    (Case(18, 40, 256, 8, 64, zeros=True), HALF, ByWarps(3, 1, 1, 4)),
    (Case(26, 90, 448, 4, 448, zero=8), BFLOAT, ByWarps(3, 1, 1, 4)),
]
"""Among them tiles in turns, clusters whose last blocks have less to do, rows that end within a stage, rows of one
scale in both widths.
"""


BY_WARPGROUPS: list[tuple[Case, torch.dtype, CodedRows]] = [
    (Case(17, 50, 384, 8, 384, torch.int8), BFLOAT, ByWarpgroups(3, 1, 1)),
    (Case(64, 160, 416, 8, 416, torch.int8, behind="residual"), BFLOAT, ByWarpgroups(4, 2, 1)),
    (Case(33, 400, 640, 4, 64, zeros=True), HALF, ByWarpgroups(3, 3, 2)),
    (Case(40, 450, 288, 4, 32, zero=8, behind="gated"), BFLOAT, ByWarpgroups(3, 1, 3)),
    (Case(24, 70, 256, 4, 128, codebook=True), BFLOAT, ByWarpgroups(4, 1, 1)),
    (Case(20, 64, 512, 8, 128, torch.float8_e4m3fn, rows=128), HALF, ByWarpgroups(3, 2, 1)),
    (Case(50, 240, 320, 8, 32, torch.int8, biases=True), BFLOAT, ByWarpgroups(3, 1, 2)),
    (Case(18, 40, 256, 8, 64, zeros=True), HALF, ByWarpgroups(3, 1, 1)),
    (Case(21, 130, 416, 8, 416, torch.int8), HALF, ByWarpgroups(4, 2, 1, places=64)),
    (Case(35, 90, 320, 4, 64, zeros=True, behind="residual"), BFLOAT, ByWarpgroups(3, 1, 1, places=64)),
    (Case(150, 160, 288, 4, 32, zeros=True), BFLOAT, ByWarpgroups(3, 1, 2, 128)),
    (Case(200, 96, 320, 8, 320, torch.int8, behind="gated"), BFLOAT, ByWarpgroups(3, 1, 1, 192)),
    (Case(20, 136, 192, 8, 64, zeros=True, behind="residual"), BFLOAT, ByWarpgroups(3, 1, 2, places=64)),
    (Case(26, 90, 448, 4, 448, zero=8), BFLOAT, ByWarpgroups(3, 1, 1)),
]
"""The same for warpgroups: tiles in turns, fewer spans than stages and more, lines of codes of 32, 64 and 128 bytes."""


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes sizes the only candidate, and two blocks all that a launch without clusters has."""

    def forced(sizes: CodedRows) -> None:
        coded_rows._ranked.cache_clear()

        def only(work: Work, device: DeviceModel) -> Iterator[Candidate[CodedRows]]:
            yield Candidate("coded_rows", sizes, 1.0, WARPGROUPS if isinstance(sizes, ByWarpgroups) else CLUSTERS)

        def clusters(sizes: CodedRows, work: Work, device: DeviceModel) -> int:
            return sizes.tiles(work) if sizes.cluster > 1 else min(2, sizes.tiles(work))

        monkeypatch.setattr(coded_rows, "coded_rows_candidates", only)
        monkeypatch.setattr(CodedRows, "clusters", clusters)

    yield forced
    coded_rows._ranked.cache_clear()


def launch_of(plan: ExecutionPlan) -> KernelCall:
    """The launch that a plan prefers."""
    (option,) = [option for step in plan.steps for option in options_of(step)[:1]]
    (call,) = option.calls
    assert isinstance(call, KernelCall)
    assert plan.kernels[call.kernel].entry in ("coded_rows", "warpgroup_codes")
    return call


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(("case", "dtype", "sizes"), FORCED + BY_WARPGROUPS, ids=str)
def test_threads_on_the_processor_give_the_product(
    case: Case, dtype: torch.dtype, sizes: CodedRows, force: Any, tmp_path: Path
) -> None:
    force(sizes)
    plan, parts, (x, y, norm) = case.program(dtype).main, case.parts(dtype), inputs_of(case, dtype)
    named = {**{f"p_{name}": part for name, part in parts.items()}, "x": x, "y": y}
    tensors = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in named.items()}
    found = torch.from_numpy(run_on_host(plan, launch_of(plan), tensors, tmp_path).copy()).view(dtype)
    exact, weight = case.exact(parts, x, y, norm)
    plain = (x.double() @ weight.to(dtype).double().T).to(dtype).double() if not case.behind else exact.to(dtype)
    error, rounding = (float((a.double() - exact).norm()) for a in (found.reshape(exact.shape), plain))
    assert error <= (3.0 if case.behind or case.codebook else 1.2) * rounding


@pytest.mark.parametrize("at", range(len(FORCED + BY_WARPGROUPS)))
def test_kernels_compile(at: int, force: Any) -> None:
    case, dtype, sizes = (FORCED + BY_WARPGROUPS)[at]
    force(sizes)
    plan = case.program(dtype).main
    architecture = 80 if isinstance(sizes, ByWarps) and sizes.cluster == 1 and at % 2 else 90
    check_compile([plan.kernels[launch_of(plan).kernel]], architecture)


def relative_error(case: Case, dtype: torch.dtype, device: Device) -> float:
    """Beside that of the product of the weight rounded to 16 bits."""
    given, plain = errors(case, dtype, device)
    return given / (plain + 1e-6) / (3.0 if case.behind or case.codebook else 1.2)


@pytest.mark.parametrize(("case", "dtype", "sizes"), FORCED + BY_WARPGROUPS, ids=str)
def test_all_sizes_err_as_the_16_bit_product(
    case: Case, dtype: torch.dtype, sizes: CodedRows, force: Any, device: Device
) -> None:
    force(sizes)
    assert relative_error(case, dtype, device) <= 1


@HALVES
@pytest.mark.parametrize("case", [case for case, _, _ in FORCED + BY_WARPGROUPS], ids=str)
def test_chosen_sizes_err_as_the_16_bit_product(case: Case, dtype: torch.dtype, device: Device) -> None:
    assert relative_error(case, dtype, device) <= 1


@pytest.mark.parametrize("rows", [17, 32, 64, 65, 200, 2048])
@pytest.mark.parametrize(("outputs", "k"), [(2048, 1536), (1536, 8960), (151936, 1536), (17, 128)])
@pytest.mark.parametrize("bits", [4, 8])
def test_candidates_fit_the_device(rows: int, outputs: int, k: int, bits: int) -> None:
    work = Work(rows, outputs, k, bits, 64, 4)
    for found in coded_rows_candidates(work, H200):
        sizes = found.sizes
        assert sizes.shared_bytes(work) <= H200.shared_bytes
        assert sizes.cluster == 1 or sizes.clusters(work, H200) * sizes.cluster <= H200.cores
