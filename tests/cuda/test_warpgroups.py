"""Every tiling for warpgroups, on ragged products and convolutions; and that other devices keep what they had."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import ceil
from typing import TypeGuard

import pytest
import torch

import npu_compiler
from cuda_compiler.devices import DEVICES
from cuda_compiler.images import convolution
from cuda_compiler.products import matmul
from cuda_compiler.tiles.clusters import ClusterCosts, cluster_candidates
from cuda_compiler.tiles.lowering import close_tilings
from cuda_compiler.tiles.teams import TeamCosts, TeamTiling, team_candidates
from cuda_compiler.tiles.tiling import Asked, Tiling
from cuda_compiler.tiles.warps import warp_candidates
from npu_compiler.artifact.plan import CallChoice
from npu_compiler.lowering.candidates import Candidate
from npu_compiler.lowering.device_model import DeviceModel, DeviceModels
from npu_runtime import Device
from tests.cuda.kernels import check_compile, kernels_for
from tests.cuda.test_matvec import CUDAGraph
from tests.ops import test_ops
from tests.ops.cases import Case, case, floats

MODEL = DEVICES.named("sm_90", "cuda")
TEAMS = [tile.tiling for tile in TeamCosts.of(MODEL).tiles]
TILINGS: list[Tiling] = [*TEAMS, *(tile.tiling(tile.stages, 1) for tile in ClusterCosts.of(MODEL).tiles)]
SPLITS = (2, 3, 8)
Force = Callable[[Tiling], None]


def _name(tiling: Tiling) -> str:
    return f"{tiling.rows}x{tiling.columns}x{tiling.stages}" + (f"-{tiling.teams}" if _has_teams(tiling) else "")


def _has_teams(tiling: Tiling) -> TypeGuard[TeamTiling]:
    return isinstance(tiling, TeamTiling)


def _shared(tiling: Tiling, number: int) -> Tiling:
    """A tiling for clusters, with one number of splits or another."""
    return tiling if _has_teams(tiling) else replace(tiling, splits=SPLITS[number % len(SPLITS)])


each_tiling = pytest.mark.parametrize("tiling", TILINGS, ids=_name)


def _convolution(channels: int, outputs: int, side: int, taps: int, stride: int, padding: int, groups: int) -> Case:
    x = floats(3, channels, side, side + 3, low=-0.5, high=0.5)
    w = floats(outputs, channels // groups, taps, taps, low=-0.5, high=0.5)
    along = [stride, stride], [padding, padding], [1, 1]
    return case("conv2d.default", x, w, floats(outputs), *along, groups)


CASES = [
    case("linear.default", floats(300, 648, low=-0.5, high=0.5), floats(264, 648, low=-0.5, high=0.5), floats(264)),
    case("linear.default", floats(130, 2056, low=-0.5, high=0.5), floats(100, 2056, low=-0.5, high=0.5)),
    case("bmm.default", floats(3, 70, 136), floats(3, 200, 136).through("aten.transpose.int", 1, 2)),
    _convolution(64, 200, 13, 3, 2, 1, 1),
    _convolution(40, 72, 9, 3, 1, 1, 1),
    _convolution(64, 64, 11, 1, 1, 0, 1),
    _convolution(96, 256, 8, 3, 1, 2, 2),
]


def best(candidates: Iterable[Candidate[Tiling]]) -> Candidate[Tiling]:
    return min(candidates, key=lambda candidate: candidate.microseconds)


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Lets every product and convolution that warpgroups can multiply take a tiling, if its splits have steps enough.

    Teams compute several tiles of results each, as if the device had two multiprocessors.
    """
    small = replace(MODEL, cores=2)
    monkeypatch.setattr(DeviceModels, "named", lambda *_: small)

    def use(tiling: Tiling) -> None:
        def chosen(asked: Asked, device: DeviceModel, warpgroups: bool) -> tuple[Tiling, ...]:
            general = best(warp_candidates(asked, device)).sizes
            fits = _has_teams(tiling) or tiling.splits * 2 <= ceil(asked.k / tiling.depth)
            return (tiling if fits else TEAMS[0], general) if warpgroups else (general,)

        for module in (matmul, convolution):
            monkeypatch.setattr(module, "close_tilings", chosen)

    return use


@each_tiling
def test_tilings_fit_a_multiprocessor(tiling: Tiling) -> None:
    for number in range(len(SPLITS)):
        whole = _shared(tiling, number)
        assert whole.shared_bytes <= MODEL.shared_bytes
        assert whole.blocks * (whole.shared_bytes + 1024) <= MODEL.core_shared_bytes


@pytest.mark.parametrize("architecture", [70, 80, 90])
def test_every_tiling_compiles(architecture: int, force: Force) -> None:
    kernels = []
    for number, tiling in enumerate(TILINGS):
        force(_shared(tiling, number))
        plan = npu_compiler.compile(CASES[number % len(CASES)].ir(torch.float32), "cuda").main
        choice = next(step for step in plan.steps if isinstance(step, CallChoice))
        assert choice.options[0].requires == "sm_90a"
        kernels += kernels_for(plan, architecture)
    check_compile(kernels, architecture)


def test_only_the_capability_that_has_them_runs_them() -> None:
    linear = case("linear.default", floats(512, 1024), floats(256, 1024))
    plan = npu_compiler.compile(linear.ir(torch.float32), "cuda").main
    for capability in (80, 100):
        assert not any("wgmma" in kernel.text for kernel in kernels_for(plan, capability))
    assert any("wgmma" in kernel.text for kernel in kernels_for(plan, 90))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (49, 512, 4608), (128, 17920, 1536), (802816, 64, 64)])
def test_blocks_of_a_cluster_all_have_steps(m: int, n: int, k: int) -> None:
    for candidate in cluster_candidates(Asked(m, n, k), MODEL):
        assert 4 <= candidate.sizes.splits * 2 <= ceil(k / candidate.sizes.depth)


def test_blocks_of_teams_stay() -> None:
    few, many = (best(team_candidates(Asked(m, 256, 576), MODEL)).sizes for m in (49, 50176))
    assert few.grid(4, MODEL) == 4
    assert many.grid(1000, MODEL) == MODEL.cores


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (6272, 128, 512), (512, 1536, 8960), (802816, 64, 64)])
@pytest.mark.parametrize("warpgroups", [True, False])
def test_close_tilings_are_few_and_serve_every_device(m: int, n: int, k: int, warpgroups: bool) -> None:
    tilings = close_tilings(Asked(m, n, k), MODEL, warpgroups)
    assert 1 <= len(tilings) <= 5
    assert len(set(tilings)) == len(tilings)
    assert any(not tiling.requires for tiling in tilings)
    assert warpgroups or not any(tiling.requires for tiling in tilings)


@each_tiling
@pytest.mark.parametrize("number", range(len(CASES)))
def test_equals_torch(tiling: Tiling, number: int, force: Force, device: Device) -> None:
    turn = number + TILINGS.index(tiling)
    force(_shared(tiling, turn))
    compute = torch.float16 if turn % 8 < 4 else torch.bfloat16
    test_ops.check(CASES[number], torch.float32, compute, device)


@each_tiling
def test_pairs_and_a_residual(tiling: Tiling, force: Force, device: Device) -> None:
    force(tiling if _has_teams(tiling) else replace(tiling, splits=4))
    graph = CUDAGraph(torch.bfloat16)
    x = graph.input(190, 520)
    gate, up = (graph.call("linear", x, graph.weight(148, 520)) for _ in range(2))
    gated = graph.call("mul.Tensor", graph.call("silu", gate), up)
    added = graph.call("add.Tensor", graph.input(190, 264), graph.call("linear", x, graph.weight(264, 520)))
    graph.check(gated, added, roundings=4, device=device)
