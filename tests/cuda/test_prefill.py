"""Attention of many rows on a CUDA device, against PyTorch in float64: every way to divide it, every kind of mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import npu_compiler
from cuda_compiler.attention import prefill
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from npu_compiler.lowering.device_model import DeviceModel
from npu_compiler.lowering.problems.attention import Attention
from npu_runtime import Device
from tests.cuda.test_attention import BOTH, NAME, added, grouped, up_to
from tests.ops import test_ops
from tests.ops.cases import BOOL, Case, Operand, case, floats
from tests.support.host_kernels import HAS_COMPILER, run_plan_on_host


def many(heads: int, groups: int, rows: int, length: int, size: int, *mask: Operand, **options: object) -> Case:
    """Enough heads to fill a device with tiles of 128 rows."""
    q, keys = floats(2, heads, rows, size), [floats(2, groups, length, size) for _ in range(2)]
    return case(NAME, q, *keys, *mask, enable_gqa=True, **options).storing(2)


def closed_rows(rows: int, length: int) -> Operand:
    """Every third row is closed everywhere, and so are all from 100 on."""
    data = tuple(float(i % 3 != 0 and i < 100 and (i + j) % 5 != 0) for i in range(rows) for j in range(length))
    return Operand((1, 1, rows, length), BOOL, data=data)


CASES = [
    *(grouped(150, 333, size, up_to(150, 333, 100)) for size in (16, 32, 48, 64, 80, 96, 128)),
    grouped(300, 700, 64, added(300, 700, 300, float("-inf"))),
    grouped(129, 257, 128, added(129, 257, 128, -3.0)),
    grouped(70, 5000, 128, up_to(70, 5000, 4900)),
    grouped(70, 5000, 64, up_to(70, 5000, 60)),
    grouped(130, 200, 128, closed_rows(130, 200)),
    grouped(200, 90, 128, is_causal=True),
    grouped(65, 640, 128, floats(1, 12, 65, 640)),
    grouped(40, 100, 128, Operand((1, 12, 40, 100), BOOL, -1, 1)),
    case(NAME, floats(2, 3, 77, 128), floats(2, 3, 66, 128), floats(2, 3, 66, 64), scale=0.3).storing(2),
    many(70, 70, 130, 300, 64, is_causal=True),
    many(70, 70, 70, 300, 128),
    many(96, 8, 100, 150, 128, Operand((2, 1, 100, 150), BOOL, -1, 1)),
    many(96, 8, 100, 150, 96, floats(1, 96, 100, 150)),
    many(96, 32, 100, 300, 80, up_to(100, 300, 190)),
    case(NAME, *[floats(3, 4, 6, 144, 32)] * 3, floats(4, 6, 144, 144)).storing(2),
    case(NAME, *[floats(3, 4, 2, 144, 32)] * 3, Operand((4, 1, 144, 144), BOOL, -1, 1)).storing(2),
]


def lowered(case: Case) -> list[str]:
    """The kernels of the ways to compute a case, the preferred first."""
    main = npu_compiler.compile(case.ir(torch.float32), "cuda").main
    calls = [option.calls[-1] for option in options_of(main.steps[-1])]
    return [main.kernels[call.kernel].entry for call in calls if isinstance(call, KernelCall)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_warpgroups_are_preferred_and_any_device_has_a_way(case: Case) -> None:
    assert lowered(case) == ["attention_prefill", "attention"]


@pytest.mark.parametrize(
    "case",
    [
        grouped(10, 300, 128, is_causal=True),
        grouped(100, 300, 136, is_causal=True),
        grouped(100, 300, 72, is_causal=True),
        grouped(100, 300, 64, scale=-0.5),
        case(
            NAME,
            floats(1, 12, 100, 128),
            *[floats(1, 2, 1, 128).through("aten.expand.default", (1, 2, 300, 128))] * 2,
            enable_gqa=True,
        ),
        case(
            NAME,
            floats(1, 12, 100, 128),
            *[floats(1, 2, 128, 300).through("aten.permute.default", (0, 1, 3, 2))] * 2,
            enable_gqa=True,
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_warpgroups_takes_the_other_way(case: Case) -> None:
    assert lowered(case) == ["attention"]


@BOTH
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch(case: Case, compute: torch.dtype, device: Device) -> None:
    test_ops.check(case, torch.float32, compute, device)


def halves(rows: int, length: int, *mask: Operand, **options: object) -> Case:
    """Two query heads for one head of keys."""
    keys = [floats(1, 1, length, 64) for _ in range(2)]
    return case(NAME, floats(1, 2, rows, 64), *keys, *mask, enable_gqa=True, **options).storing(2)


def random_mask(rows: int, length: int) -> Operand:
    drawn = np.random.default_rng(rows).random((rows, length)) < 0.5
    return Operand((1, 1, rows, length), BOOL, data=tuple(map(float, drawn.reshape(-1))))


def check_on_host(case: Case, plan: ExecutionPlan, folder: Path) -> None:
    """Runs a plan for bfloat16 on the processor and compares the result with PyTorch in float64."""
    generator = torch.Generator().manual_seed(0)
    tensors = [operand.tensor(generator, torch.bfloat16) for operand in case.operands()]
    specs = {spec.name: spec for spec in (*plan.inputs, *plan.outputs)}
    stored = {f"x{number}": tensor for number, tensor in enumerate(tensors)}
    in_memory = {
        name: tensor.to(getattr(torch, specs[name].dtype.name)).permute(specs[name].layout.order).contiguous()
        for name, tensor in stored.items()
    }
    found = run_plan_on_host(plan, {name: t.view(torch.uint8).numpy() for name, t in in_memory.items()}, folder)
    (output,), (expected,) = plan.outputs, case.expected(tensors)
    order = output.layout.order
    wanted = expected.permute(order)
    result = torch.from_numpy(found[output.name]).view(torch.bfloat16).reshape(wanted.shape)
    unit = torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(result.double(), wanted, rtol=unit, atol=2 * unit * float(wanted.abs().max()))


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(("multiprocessors", "warpgroups", "blocks"), [(1, 2, 7), (1, 1, 13), (32, 1, 13)])
@pytest.mark.parametrize(
    "case",
    [
        halves(400, 400, up_to(400, 400, 0)),
        halves(390, 400, random_mask(390, 400)),
        halves(390, 390, random_mask(390, 390)),
        halves(400, 400, closed_rows(400, 400)),
        halves(400, 400, is_causal=True),
    ],
    ids=str,
)
def test_tiles_of_many_rows_on_the_processor(
    case: Case, multiprocessors: int, warpgroups: int, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles of 128 rows, and of 64."""
    plan, grids = divided(case, multiprocessors, warpgroups, monkeypatch)
    assert grids == [(blocks, 1, 1)]
    check_on_host(case, plan, tmp_path)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("mask", [random_mask(36, 2240), up_to(36, 2240, 2200)], ids=["random", "order"])
def test_more_turns_than_a_warp_looks_up_at_once(
    mask: Operand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, grids = divided(case := halves(36, 2240, mask), 1, 1, monkeypatch)
    assert grids == [(2, 1, 1)]
    check_on_host(case, plan, tmp_path)


def divided(
    case: Case, multiprocessors: int, warpgroups: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[ExecutionPlan, list[tuple[int, int, int]]]:
    """The plan for so few multiprocessors, with so many warpgroups along the rows, and the grids of its attention."""

    def divide(problem: Attention, device: DeviceModel) -> prefill._Division:
        few = replace(device, cores=multiprocessors)
        return prefill._Division(problem, few, warpgroups, 3 - warpgroups, block=64 * warpgroups, stages=2)

    monkeypatch.setattr(prefill, "_divide", divide)
    plan = npu_compiler.compile(case.ir(torch.float32), "cuda", "bfloat16").main.resolved(lambda *_: 0)
    launches = [call for call in plan.calls if isinstance(call, KernelCall)]
    return plan, [call.grid for call in launches if plan.kernels[call.kernel].entry == "attention_prefill"]
