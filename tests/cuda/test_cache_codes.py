"""Attention over keys and values in codes: which plans read the codes, that kernels compile, what they compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall
from npu_runtime import Device
from tests.cuda.kernels import check_plan_compiles
from tests.support.coded_cache import CodedStep, Sizes, check_step, error_of_results
from tests.support.host_kernels import HAS_COMPILER
from tests.support.host_outputs import outputs_on_host, stored_on_host

each_kind = pytest.mark.parametrize("kind", ["int8", "fp8"])


def planned(sizes: Sizes, kind: str, dtype: torch.dtype = torch.float16, device: str | None = None) -> ExecutionPlan:
    step = CodedStep(sizes, kind, dtype)
    ir = npu_compiler.extract(step, step.inputs(0)).ir
    return npu_compiler.compile(ir, "cuda", str(dtype).removeprefix("torch."), device).main


def entries(plan: ExecutionPlan) -> list[str]:
    return [plan.kernels[call.kernel].entry for call in plan.calls if isinstance(call, KernelCall)]


@each_kind
def test_one_kernel_turns_rounds_writes_and_reads(kind: str) -> None:
    plan = planned(Sizes(2048), kind)
    assert entries(plan) == ["elementwise", "mask_states", "attention_codes"]  # the mask, then all else
    assert len(plan.state) == 4
    assert not plan.notes


@each_kind
@pytest.mark.parametrize(
    "sizes", [Sizes(300, size=80), Sizes(300, size=256), Sizes(300, rows=8)], ids=["80", "256", "many rows"]
)
def test_what_no_kernel_reads_is_said(kind: str, sizes: Sizes) -> None:
    """Heads of no whole words, heads too large for the registers, and prefills: numbers are made ahead."""
    plan = planned(sizes, kind)
    assert "attention_codes" not in entries(plan)
    assert any("stored as numbers before they are read" in note for note in plan.notes)


@each_kind
def test_a_gpu_without_clusters_reads_numbers_and_says_so(kind: str) -> None:
    plan = planned(Sizes(2048), kind, device="sm_80")
    assert "attention_codes" not in entries(plan)
    (note,) = plan.notes
    assert "stored as numbers before they are read, as 'cuda' loads no such codes there" in note


@each_kind
@pytest.mark.parametrize("architecture", [70, 80, 90])
def test_kernels_compile(kind: str, architecture: int) -> None:
    sizes = {70: Sizes(64, 32, 1, 1), 80: Sizes(200, 96, 1, 4, 4), 90: Sizes(32768, 128, 2, 6)}[architecture]
    check_plan_compiles(planned(sizes, kind, torch.float16 if architecture < 80 else torch.bfloat16), architecture)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "positions"),
    [
        (Sizes(2048, 128, 2, 6), [30, 127, 1000, 2047]),
        (Sizes(9000, 128, 2, 6), [4095, 4096, 8999]),
        (Sizes(300, 64, 3, 1), [77, 299]),
        (Sizes(336, 64, 2, 2), [77, 335]),  # whole pieces, but no whole blocks
        (Sizes(300, 96, 1, 8), [77, 299]),
        (Sizes(300, 32, 2, 2), [77, 299]),
        (Sizes(700, 64, 2, 4, 3), [13, 62, 697]),
    ],
    ids=str,
)
def test_steps_over_codes_err_as_over_16_bits(
    kind: str, dtype: torch.dtype, sizes: Sizes, positions: list[int], device: Device
) -> None:
    check_step(sizes, kind, dtype, positions, device)


@pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")
@pytest.mark.parametrize(
    ("kind", "sizes", "positions"),
    [
        ("int8", Sizes(100, 64, 2, 6), [0, 70, 99]),
        ("int8", Sizes(128, 32, 1, 12), [15, 127]),
        ("fp8", Sizes(90, 96, 1, 1), [10, 64]),
        ("int8", Sizes(304, 128, 1, 2), [70, 303]),  # whole pieces, but no whole blocks; rows are permuted
        ("int8", Sizes(128, 128, 1, 3, 2), [15, 126]),  # new rows in two pieces
        ("int8", Sizes(600, 64, 1, 2), [13, 130, 599]),  # a cluster of eight blocks
        ("fp8", Sizes(4200, 32, 1, 2), [200, 4199]),  # five of them
    ],
    ids=str,
)
def test_on_a_processor_codes_equal_torch(kind: str, sizes: Sizes, positions: list[int], tmp_path: Path) -> None:
    """Thread by thread."""
    step = CodedStep(sizes, kind, torch.bfloat16)
    plan = planned(sizes, kind, torch.bfloat16).resolved(lambda choice, kernels: 0)
    for position in positions:
        given = step.inputs(position)
        flat = [*given[:5], *given[5]]
        caches = [array.astype(float) for array in [*stored_on_host(plan, flat).values()][5:]]
        faults, (result, *held) = outputs_on_host(plan, flat, tmp_path)
        assert not faults.any()
        limit = 1.2 * 2.0**-8 * float(np.sqrt(np.mean(result**2)))
        assert error_of_results(step, given, caches, result, held) < limit
