"""Attention over keys and values in pages, with the write of a step's own, against PyTorch in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cuda_runtime.nvrtc import architectures
from npu_compiler.artifact.plan import CallChoice, ExecutionPlan, KernelCall, Role
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError, MissingDependencyError
from npu_runtime import Device, Executor
from tests.cuda.kernels import check_plan_compiles
from tests.support.host_kernels import HAS_COMPILER
from tests.support.host_outputs import outputs_on_host
from tests.support.paged_steps import (
    PagedStep,
    Sizes,
    check_paged_step,
    check_results,
    compiled_step,
    run_step,
    step_inputs,
)

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
KINDS = pytest.mark.parametrize("kind", ["16", "int8", "fp8"])


CASES: list[tuple[Sizes, list[list[int]]]] = [
    (Sizes(1, 16), [[0], [15], [127], [128], [1000], [2047]]),
    (Sizes(8, 16), [[0, 63, 64, 127, 128, 700, 1023, -1], [-1] * 8, [2047, 1, 2, 3, 4, 5, 6, 7]]),
    (Sizes(8, 16), [[14, 15, 16, 31, 32, 47, 48, 79]]),
    (Sizes(3, 4, page=64, size=64, groups=3, shared=1), [[0, 100, 255], [64, -1, 63]]),
    (Sizes(2, 4, page=256, size=96, groups=1, shared=8), [[300, 1023], [255, 256]]),
    (Sizes(2, 2, page=64, size=256, groups=1, shared=4), [[3, 127]]),
    (Sizes(2, 6, size=64, groups=2, shared=4, rows=3), [[5, 700], [127, 128]]),
    (Sizes(64, 16, pages=200), [[(37 * lane) % 400 for lane in range(64)]]),
    (Sizes(4, 64, page=64, pages=100), [[4095, 100, -1, 1000]]),
    (Sizes(1, 64, pages=70), [[8191], [100], [5000]]),
    (Sizes(1, 16, rows=128), [[127], [300], [2047]]),
    (Sizes(1, 32, page=64, rows=128), [[127], [333]]),
    (Sizes(1, 16, size=64, groups=2, shared=4, rows=40), [[39], [1000]]),
    (Sizes(15, 2, size=32, groups=1, shared=2, rows=8, wide=4), [[8 + 13 * lane for lane in range(15)]]),
]


def executor_of(sizes: Sizes, kind: str, dtype: torch.dtype, device: Device) -> tuple[Executor, PagedStep]:
    step = PagedStep(sizes, kind, dtype)
    return Executor(compiled_step(step, "cuda"), device), step


@KINDS
@BOTH
@pytest.mark.parametrize(("sizes", "cases"), CASES, ids=[str(sizes) for sizes, _ in CASES])
def test_equals_torch(sizes: Sizes, cases: list[list[int]], dtype: torch.dtype, kind: str, device: Device) -> None:
    executor, step = executor_of(sizes, kind, dtype, device)
    for ends in cases:
        check_paged_step(executor, step, step_inputs(step, ends, shares=True), device)


@KINDS
@BOTH
def test_texts_that_write_to_each_others_pages_see_what_all_have_written(
    dtype: torch.dtype, kind: str, device: Device
) -> None:
    executor, step = executor_of(Sizes(8, 4), kind, dtype, device)
    given = step_inputs(step, [500] + [-1] * 7)
    given["tables"][:] = given["tables"][0].clone()
    given["positions"][:, 0] = torch.tensor([500, 100, 101, 130, 102, 103, 255, 104])
    check_paged_step(executor, step, given, device)


@KINDS
@pytest.mark.parametrize("option", [1, 2], ids=["sm_80", "any"])
@pytest.mark.parametrize("sizes", [Sizes(8, 16), Sizes(1, 64, pages=70)], ids=str)
def test_what_devices_without_clusters_run_equals_torch(sizes: Sizes, option: int, kind: str, device: Device) -> None:
    step = PagedStep(sizes, kind, torch.bfloat16)
    program = compiled_step(step, "cuda")
    assert [each.requires for each in programs_choice(program).options] == ["sm_90", "sm_80", ""]
    plan = program.main.resolved(lambda choice, kernels: option)
    executor = Executor(replace(program, functions={"main": plan}), device)
    ends = [8191] if sizes.lanes == 1 else [0, 63, 64, 127, 128, 700, 1023, -1]
    check_paged_step(executor, step, step_inputs(step, ends), device)


@KINDS
@BOTH
def test_a_text_has_the_same_bits_whatever_the_others_are(dtype: torch.dtype, kind: str, device: Device) -> None:
    executor, step = executor_of(Sizes(8, 16), kind, dtype, device)
    together = step_inputs(step, [700, 63, 64, 127, 128, 0, 1023, -1])
    alone = together | {name: together[name].clone() for name in ("positions", "tables")}
    alone["positions"][1:], alone["tables"][1:] = -1, step.sizes.pages
    results = [run_step(executor, given, device)[0][0] for given in (together, alone)]
    np.testing.assert_array_equal(*results)


@KINDS
@pytest.mark.parametrize("page", [41, 1 << 20, -42], ids=str)
def test_a_page_that_there_is_none_of_is_refused(page: int, kind: str, device: Device) -> None:
    executor, step = executor_of(Sizes(2, 4), kind, torch.bfloat16, device)
    given = step_inputs(step, [300, 100])
    given["tables"][0, 1] = page
    with pytest.raises(InputError, match="tables"):
        run_step(executor, given, device)
    run_step(executor, step_inputs(step, [300, 100]), device)


def programs_choice(program: CompiledProgram) -> CallChoice:
    (choice,) = (step for step in program.main.steps if isinstance(step, CallChoice))
    return choice


@pytest.mark.parametrize("sizes", [Sizes(8, 16), Sizes(1, 16), Sizes(1, 16, rows=128)], ids=str)
def test_nothing_is_gathered(sizes: Sizes) -> None:
    program = compiled_step(PagedStep(sizes), "cuda")
    assert all(len(option.calls) <= 2 for option in programs_choice(program).options)
    pool = (sizes.pages + 1) * sizes.groups * sizes.page * sizes.size * 2
    gathered = sizes.lanes * sizes.count * sizes.page * sizes.groups * sizes.size * 2
    largest = max(buffer.nbytes for buffer in program.main.buffers if buffer.nbytes != pool)
    assert largest < gathered or sizes.rows > 1


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("sizes", [Sizes(8, 16), Sizes(1, 16), Sizes(4, 64, rows=4)], ids=str)
def test_codes_are_read_where_they_lie(sizes: Sizes, kind: str) -> None:
    """One launch turns, rounds, writes and reads them; those of more rows, or for older GPUs, read codes as well."""
    program = compiled_step(PagedStep(sizes, kind), "cuda")
    assert not program.main.notes
    if sizes.rows == 1:
        assert [len(option.calls) for option in programs_choice(program).options[:2]] == [1, 1]
    arena = sum(buffer.nbytes for buffer in program.main.buffers if buffer.role is Role.ARENA)
    assert arena < sizes.lanes * sizes.count * sizes.page * sizes.groups * sizes.size


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("sizes", [Sizes(1, 16, rows=128), Sizes(2, 2, page=64, size=256, groups=1, shared=4)], ids=str)
def test_what_no_kernel_reads_is_said(sizes: Sizes, kind: str) -> None:
    """Long chunks, and heads too large for the registers: numbers are made ahead of what the tables name."""
    program = compiled_step(PagedStep(sizes, kind), "cuda")
    assert any("stored as numbers before they are read" in note for note in program.main.notes)


@KINDS
def test_pages_whose_places_take_more_than_15_bits_are_gathered(kind: str) -> None:
    for page, is_read in ((1 << 15, True), (1 << 16, False)):
        program = compiled_step(PagedStep(Sizes(1, 1, page, 64, 1, 1, pages=2), kind), "cuda")
        entries = {
            program.main.kernels[call.kernel].entry for call in program.main.calls if isinstance(call, KernelCall)
        }
        assert ("attention_paged" in entries) == is_read


@pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")
@pytest.mark.parametrize(
    ("kind", "sizes", "ends", "shares", "requires"),
    [
        ("int8", Sizes(3, 4, page=64, size=64, groups=2, shared=3, pages=14), [100, -1, 37], True, "sm_80"),
        ("fp8", Sizes(2, 2, page=64, size=128, groups=2, shared=6, rows=2, pages=5), [70, 127], False, "sm_80"),
        ("fp8", Sizes(1, 3, page=64, size=96, groups=3, shared=1, pages=4), [191], False, "sm_80"),
        ("int8", Sizes(2, 2, page=64, size=32, groups=2, shared=9, pages=3), [15, 16], False, "sm_80"),
        ("int8", Sizes(3, 4, page=64, size=64, groups=2, shared=3, pages=14), [100, -1, 37], True, "sm_90"),
        ("int8", Sizes(2, 3, page=64, size=128, groups=1, shared=2, pages=7), [15, 130], False, "sm_90"),
        ("16", Sizes(2, 9, page=64, size=64, groups=1, shared=3, pages=19), [573, 129], False, "sm_90"),
        (
            *("16", Sizes(15, 1, page=64, size=16, groups=1, shared=2, rows=8, pages=16, wide=8)),
            *([7, 63, *[8 + 4 * lane for lane in range(13)]], False, "sm_90"),
        ),
    ],
    ids=str,
)
def test_on_a_processor_steps_equal_torch(
    sizes: Sizes, ends: list[int], shares: bool, kind: str, requires: str, tmp_path: Path
) -> None:
    """Thread by thread; two lanes then write to one page, whose new tokens both see."""
    step = PagedStep(sizes, kind, torch.bfloat16)
    plan = compiled_step(step, "cuda").main.resolved(
        lambda choice, kernels: [option.requires for option in choice.options].index(requires)
    )
    given = step_inputs(step, ends, shares)
    check_results(step, given, host_results(plan, given, tmp_path))
    if sizes.lanes > 1:
        given["tables"][:] = given["tables"][0].clone()
        given["positions"][:, 0] = torch.arange(len(ends)) + 14
        check_results(step, given, host_results(plan, given, tmp_path))


@pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")
def test_on_a_processor_many_rows_equal_torch(tmp_path: Path) -> None:
    """Of two lanes, the copy engine bringing what lies in their pages."""
    step = PagedStep(Sizes(2, 4, page=64, size=64, groups=2, shared=2, rows=40, pages=9), "16", torch.bfloat16)
    plan = compiled_step(step, "cuda").main.resolved(lambda *_: 0)
    assert "attention_prefill" in [kernel.entry for kernel in plan.kernels]
    given = step_inputs(step, [200, 39])
    check_results(step, given, host_results(plan, given, tmp_path))


def host_results(plan: ExecutionPlan, given: dict[str, Any], folder: Path) -> list[NDArray[np.float64]]:
    flat = [*(value for name, value in given.items() if name != "pools"), *given["pools"]]
    faults, results = outputs_on_host(plan, flat, folder)
    assert not faults.any()
    return results


@KINDS
@pytest.mark.parametrize("sizes", [sizes for sizes, _ in CASES], ids=str)
def test_kernels_compile(sizes: Sizes, kind: str) -> None:
    try:
        known = architectures()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    for architecture in (70, 80, 90):
        if architecture in known and (architecture > 70 or sizes == CASES[2][0]):  # old ones take seconds each
            check_plan_compiles(compiled_step(PagedStep(sizes, kind), "cuda").main, architecture)
