"""Products whose operands the copy engine brings: every way to cut them up, ragged sizes, every kind of epilogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import npu_compiler
from cuda_compiler.artifact.extensions import map_of
from cuda_compiler.devices import DEVICES
from cuda_compiler.products import bulk
from cuda_compiler.products.bulk_tilings import BulkCosts, BulkTiling, bulk_tilings
from cuda_compiler.tiles.tiling import Asked
from npu_compiler.artifact.plan import CallChoice, ExecutionPlan, KernelCall, LibraryCall, options_of
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.integers import ceil_div
from npu_compiler.lowering.device_model import DeviceModel
from npu_runtime import Device
from tests.cuda.kernels import check_compile, kernels_for
from tests.cuda.test_matvec import CUDAGraph
from tests.metal.graphs import Node
from tests.support.host_kernels import HAS_COMPILER, run_on_host
from tests.support.ir_builder import IRBuilder

MODEL = DEVICES.named("sm_90", "cuda")
Force = Callable[[BulkTiling], None]

TILINGS = [BulkTiling.of(tile, MODEL, tile.rows) for tile in BulkCosts.of(MODEL).tiles]
SIZES = [(66, 32, 8), (130, 224, 520), (300, 800, 1096), (517, 416, 72)]
FEW_ROWS = [(17, 416, 1096), (40, 224, 520), (64, 800, 1544), (66, 32, 8)]


def _name(tiling: BulkTiling) -> str:
    kind = "turns" if tiling.turns else "shared"
    return f"{tiling.rows}x{tiling.columns} {kind} {tiling.splits}"


each_tiling = pytest.mark.parametrize("tiling", TILINGS, ids=_name)
BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Lets every product that the copy engine can serve take a tiling."""

    def use(tiling: BulkTiling) -> None:
        def chosen(asked: Asked, device: DeviceModel) -> tuple[BulkTiling, ...]:
            return (replace(tiling, splits=min(tiling.splits, ceil_div(asked.k, 64))),)

        monkeypatch.setattr(bulk, "bulk_tilings", chosen)

    return use


def products(dtype: torch.dtype, m: int, n: int, k: int) -> tuple[CUDAGraph, list[Node]]:
    """A product alone, with a bias, with a residual, with paired columns, and with all kinds of arithmetic."""
    graph = CUDAGraph(dtype)
    x = graph.input(m, k)
    gate, up = (graph.call("linear", x, graph.weight(n // 2, k)) for _ in range(2))
    biased = graph.call("linear", x, graph.weight(n, k), graph.weight(n))
    return graph, [
        graph.call("linear", x, graph.weight(n, k)),
        biased,
        graph.call("add.Tensor", graph.input(m, n), graph.call("linear", x, graph.weight(n, k))),
        graph.call("mul.Tensor", graph.call("silu", gate), up),
        graph.call("mul.Tensor", graph.call("linear", x, graph.weight(n, k)), graph.input(m, 1)),
    ]


def preferred(plan: ExecutionPlan) -> list[str]:
    """The kernel of every choice's preferred option."""
    choices = [step for step in plan.steps if isinstance(step, CallChoice)]
    calls = [choice.preferred.calls[0] for choice in choices]
    return [plan.kernels[call.kernel].entry for call in calls if isinstance(call, KernelCall)]


def _all_by_bulk(program: CompiledProgram) -> None:
    assert set(preferred(program.main)) == {"matmul_bulk"}


@each_tiling
def test_tilings_fit_a_multiprocessor(tiling: BulkTiling) -> None:
    assert tiling.shared_bytes(tiling.rows) <= MODEL.shared_bytes
    assert tiling.resident * (tiling.shared_bytes(tiling.rows) + 1024) <= MODEL.core_shared_bytes
    assert tiling.stages >= 4
    assert tiling.columns % 32 == 0


@each_tiling
def test_every_tiling_compiles(tiling: BulkTiling, force: Force) -> None:
    force(tiling)
    graph, results = products(torch.float16, 300, 800, 1096)
    program = graph.compile(*results[TILINGS.index(tiling) % 4 :][:2])
    _all_by_bulk(program)
    check_compile((kernel for kernel in kernels_for(program.main, 90) if kernel.entry == "matmul_bulk"), 90)


@pytest.mark.parametrize("m", [65, 128, 512, 2048, 8192])
@pytest.mark.parametrize(("n", "k"), [(17920, 1536), (1536, 8960), (2048, 1536), (1536, 1536), (32, 8), (151936, 1536)])
def test_chosen_tilings_are_sound(m: int, n: int, k: int) -> None:
    tilings = bulk_tilings(Asked(m, n, k), MODEL)
    assert len(set(tilings)) == len(tilings) <= 3
    for tiling in tilings:
        assert tiling.splits <= ceil_div(k, 64)


def test_other_devices_have_another_way() -> None:
    graph, results = products(torch.float16, 300, 800, 1096)
    plan = graph.compile(*results).main
    assert "matmul_bulk" in {kernel.entry for kernel in kernels_for(plan, 90)}
    for capability in (70, 80, 100):
        assert "matmul_bulk" not in {kernel.entry for kernel in kernels_for(plan, capability)}


@pytest.mark.parametrize(("m", "n", "k"), [(8, 64, 64), (300, 72, 64), (300, 64, 68)])
def test_what_the_copy_engine_cannot_serve_goes_another_way(m: int, n: int, k: int) -> None:
    graph = CUDAGraph(torch.float16)
    plan = graph.compile(graph.call("linear", graph.input(m, k), graph.weight(n, k))).main
    assert "matmul_bulk" not in {kernel.entry for kernel in plan.kernels}


def test_batches_go_another_way() -> None:
    graph = CUDAGraph(torch.float16)
    plan = graph.compile(graph.call("bmm", graph.input(3, 300, 64), graph.input(3, 64, 96))).main
    assert "matmul_bulk" not in {kernel.entry for kernel in plan.kernels}


def test_operands_are_bound_as_maps() -> None:
    graph = CUDAGraph(torch.bfloat16)
    plan = graph.compile(graph.call("linear", graph.input(300, 72), graph.weight(64, 72))).main
    choice = next(step for step in plan.steps if isinstance(step, CallChoice))
    call = choice.preferred.calls[0]
    assert not isinstance(call, LibraryCall)
    a, b = map(map_of, call.args[:2])
    assert a is not None
    assert b is not None
    assert (a.sizes, a.strides) == ((72, 300), (144,))
    assert (b.sizes, b.strides) == ((72, 2, 4, 4, 2), (144, 8 * 144, 2 * 144, 32 * 144))
    assert b.nbytes == 64 * 72 * 2


def scaled(graph: CUDAGraph, m: int, n: int, k: int, kind: str) -> Node:
    """A product times a number for each row and one for each column, and what epilogues do with that."""
    product = graph.call("linear", graph.input(m, k), graph.weight(n, k))
    product = graph.call("mul.Tensor", product, graph.input(m, 1))
    if kind == "gated":
        scales = graph.weight(n)
        parts = []
        for first in (0, 1):
            part = graph.call("slice.Tensor", product, 1, first, n, 2)
            parts.append(graph.call("mul.Tensor", part, graph.call("slice.Tensor", scales, 0, first, n, 2)))
        return graph.call("mul.Tensor", graph.call("silu", parts[0]), parts[1])
    product = graph.call("mul.Tensor", product, graph.weight(n))
    other = graph.input(m, n) if kind == "residual" else graph.weight(n)
    return graph.call("add.Tensor", other, product)


KINDS = ["bias", "residual", "gated"]
ON_HOST = [(0, "gated", (50, 96, 72)), (2, "residual", (33, 160, 136)), (11, "residual", (200, 96, 136))]
ON_HOST += [(13, "bias", (200, 160, 72)), (17, "gated", (300, 160, 72)), (21, "residual", (300, 224, 136))]


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(("number", "kind", "sizes"), ON_HOST, ids=str)
def test_epilogues_on_the_processor(
    number: int, kind: str, sizes: tuple[int, int, int], force: Force, tmp_path: Path
) -> None:
    force(TILINGS[number])
    graph = CUDAGraph(torch.bfloat16)
    result = scaled(graph, *sizes, kind)
    plan = graph.compile(result).main
    (call,) = [call for step in plan.steps for call in options_of(step)[0].calls]
    assert isinstance(call, KernelCall)
    call = replace(call, grid=(min(2, call.grid[0]), 1, 1))
    given = {**graph._inputs, **{f"p_{name}": tensor for name, tensor in graph._weights.items()}}
    tensors = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in given.items()}
    found = run_on_host(plan, call, tensors, tmp_path).copy().view(np.uint16)
    exact = result.reference
    error = torch.from_numpy(found).view(torch.bfloat16).double().reshape(exact.shape) - exact
    assert float(error.norm()) <= 2 * float((exact.bfloat16().double() - exact).norm())


@each_tiling
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_rows_and_columns(tiling: BulkTiling, kind: str, force: Force, device: Device) -> None:
    force(tiling)
    number, graph = TILINGS.index(tiling), CUDAGraph(torch.float16)
    sizes = SIZES[number % len(SIZES)] if tiling.rows > 64 else FEW_ROWS[number % len(FEW_ROWS)]
    _all_by_bulk(graph.check(scaled(graph, *sizes, kind), roundings=4, device=device))


@each_tiling
def test_equals_torch(tiling: BulkTiling, force: Force, device: Device) -> None:
    force(tiling)
    number = TILINGS.index(tiling)
    dtype = (torch.float16, torch.bfloat16)[number // len(SIZES) % 2]
    sizes = SIZES[number % len(SIZES)] if tiling.rows > 64 else FEW_ROWS[number % len(FEW_ROWS)]
    graph, results = products(dtype, *sizes)
    _all_by_bulk(graph.check(*results, roundings=4, device=device))


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(
    ("tiling", "sizes", "dtype"),
    [
        (BulkTiling(64, 64, stages=3), (40, 128, 200), torch.float16),
        (BulkTiling(128, 32, stages=2), (130, 96, 392), torch.bfloat16),
        (BulkTiling(64, 192, stages=4), (17, 320, 328), torch.float16),
        (BulkTiling(64, 128, splits=4, stages=3), (17, 160, 840), torch.bfloat16),
    ],
    ids=str,
)
def test_threads_on_the_processor_give_the_product(
    tiling: BulkTiling, sizes: tuple[int, int, int], dtype: torch.dtype, force: Force, tmp_path: Path
) -> None:
    """Rings are walked around several times, by two blocks at most where none share a tile."""
    force(tiling)
    m, n, k = sizes
    builder = IRBuilder()
    result = builder.call("aten.linear.default", builder.input("x", (m, k), dtype), builder.input("w", (n, k), dtype))
    plan = npu_compiler.compile(builder.build(result), "cuda", str(dtype).removeprefix("torch.")).main
    (call,) = [call for step in plan.steps for call in options_of(step)[0].calls]
    assert isinstance(call, KernelCall)
    call = replace(call, grid=(min(2, call.grid[0]), 1, 1) if tiling.splits == 1 else call.grid)
    x, w = (torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype) for size in ((m, k), (n, k)))
    given = {name: tensor.view(torch.uint8).numpy() for name, tensor in (("x", x), ("w", w))}
    found = torch.from_numpy(run_on_host(plan, call, given, tmp_path).copy()).view(dtype).reshape(m, n)
    exact = x.double() @ w.double().T
    assert (found.double() - exact).norm() <= 1.3 * (exact.to(dtype).double() - exact).norm()


@BOTH
def test_chosen_tilings_equal_torch(dtype: torch.dtype, device: Device) -> None:
    for m, n, k in [(128, 2048, 1536), (512, 1536, 1536), (700, 1536, 2240)]:
        graph, results = products(dtype, m, n, k)
        graph.check(*results, roundings=4, device=device)
