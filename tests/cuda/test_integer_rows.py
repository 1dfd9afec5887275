"""Products of one row by packed codes as integers: which take them, and what they compute.

What the kernel computes is seen on this machine's processor, thread by thread; on a GPU the cases of
`test_grouped_matvec` run it as well.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.devices import DEVICES
from cuda_compiler.products import integer_rows
from cuda_compiler.products.integer_rows_sizes import IntegerRows, Work, integer_rows_sizes
from npu_compiler.artifact.plan import ExecutionPlan, KernelCall, options_of
from tests.cuda.kernels import check_compile
from tests.cuda.test_grouped_matvec import Case, inputs_of
from tests.support.host_kernels import HAS_COMPILER, run_on_host

BFLOAT, HALF = torch.bfloat16, torch.float16
H200 = DEVICES.named("sm_90", "cuda")

FORCED: list[tuple[Case, torch.dtype, IntegerRows]] = [
    (Case(n=64, k=1024, bits=8, kind=torch.int8, group=1024), BFLOAT, IntegerRows(4, 2, 2)),
    (Case(n=80, k=1024, zeros=True), BFLOAT, IntegerRows(1, 3, 2)),
    (Case(n=48, k=1280, zeros=True, behind="residual"), BFLOAT, IntegerRows(2, 4, 1)),
    (Case(n=48, k=1024, zeros=True, group=128), HALF, IntegerRows(2, 2, 3)),
    (Case(n=32, k=384, zero=8, group=32), BFLOAT, IntegerRows(8, 1, 2)),
    (Case(n=32, k=768, bits=8, zeros=True), BFLOAT, IntegerRows(2, 2, 2)),
    (Case(n=64, k=768, bits=8, kind=torch.int8, group=128, behind="norm ahead"), BFLOAT, IntegerRows(1, 3, 1)),
    (Case(n=64, k=512, zeros=True, behind="gated"), BFLOAT, IntegerRows(8, 1, 2)),
    (Case(n=32, k=896, bits=8, zero=128, group=896), HALF, IntegerRows(8, 1, 1)),
    (Case(n=64, k=1280, zeros=True, behind="layer norm ahead"), BFLOAT, IntegerRows(2, 2, 2)),
    (Case(n=48, k=2048, zeros=True), BFLOAT, IntegerRows(1, 4, 3)),
    (Case(n=4272, k=1536, zeros=True, behind="norm ahead"), BFLOAT, IntegerRows(1, 3, 4)),
    (Case(n=2144, k=768, zeros=True, behind="norm ahead"), BFLOAT, IntegerRows(1, 1, 2)),
    (Case(n=4304, k=512, bits=8, kind=torch.int8, group=512), BFLOAT, IntegerRows(2, 1, 1)),
    (Case(n=2144, k=768, zeros=True), BFLOAT, IntegerRows(1, 1, 6)),
    (Case(n=2144, k=768, zeros=True, behind="bias"), BFLOAT, IntegerRows(1, 1, 2)),
    (Case(n=96, k=1536, zeros=True, behind="norm ahead"), BFLOAT, IntegerRows(9, 1, 6, beside=True)),
    (Case(n=96, k=1280, bits=8, kind=torch.int8, group=1280), BFLOAT, IntegerRows(3, 3, 2)),
]
"""Among them tiles in turns, codes of several tiles on their way, tiles that are held, alone and two in turns, scales
whose rows would begin in the same bank, teams without a tile, rows that end within a step, shares of several sizes.
"""


def entries_of(case: Case) -> list[tuple[str, str]]:
    """What each launch of a product, of one step, requires, and its kernel."""
    plan = case.program(BFLOAT).main
    (step,) = plan.steps
    calls = [(option.requires, call) for option in options_of(step) for call in option.calls]
    return [(requires, plan.kernels[call.kernel].entry) for requires, call in calls if isinstance(call, KernelCall)]


def launch_of(plan: ExecutionPlan) -> KernelCall:
    """The launch that a plan prefers."""
    (option,) = [option for step in plan.steps for option in options_of(step)[:1]]
    (call,) = option.calls
    assert isinstance(call, KernelCall)
    return call


def force(monkeypatch: pytest.MonkeyPatch, sizes: IntegerRows) -> None:
    monkeypatch.setattr(integer_rows, "integer_rows_sizes", lambda work, device: sizes)


def errors_on_host(case: Case, dtype: torch.dtype, x: torch.Tensor, folder: Path) -> tuple[float, float]:
    """How far the kernel's result is from the exact one, and how far that of weights rounded to 16 bits, rounded.

    The kernel's has the same bits in both orders of threads.
    """
    plan, parts, (_, y, norm) = case.program(dtype).main, case.parts(dtype), inputs_of(case, dtype)
    named = {**{f"p_{name}": part for name, part in parts.items()}, "x": x, "y": y, "p_norm": norm, "p_bias": y[0]}
    tensors = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in named.items()}
    result, other = (run_on_host(plan, launch_of(plan), tensors, folder, backwards) for backwards in (False, True))
    assert (result == other).all()
    found = torch.from_numpy(result.copy()).view(dtype)
    exact, weight = case.exact(parts, x, y, norm)
    plain = (x.double() @ weight.to(dtype).double().T).to(dtype).double() if not case.behind else exact.to(dtype)
    error, rounding = (float((a.double() - exact).norm()) for a in (found.reshape(exact.shape), plain))
    return error, rounding


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(("case", "dtype", "sizes"), FORCED, ids=str)
def test_threads_on_the_processor_give_the_product(
    case: Case, dtype: torch.dtype, sizes: IntegerRows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    force(monkeypatch, sizes)
    error, rounding = errors_on_host(case, dtype, inputs_of(case, dtype)[0], tmp_path)
    assert error <= (3.0 if case.behind else 1.2) * rounding


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("largest", [300.0, 3e4])
def test_vectors_may_have_numbers_far_larger_than_others(
    largest: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A power of two for each unit: what is large takes bits from few neighbours alone."""
    case = Case(n=64, k=1024, bits=8, kind=torch.int8, group=1024)
    force(monkeypatch, IntegerRows(4, 2, 2))
    x = inputs_of(case, BFLOAT)[0].clone()
    x[0, 77] = largest
    error, rounding = errors_on_host(case, BFLOAT, x, tmp_path)
    assert error <= 1.2 * rounding


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_is_no_number_stays_so(number: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = Case(n=64, k=512, zeros=True)
    force(monkeypatch, IntegerRows(4, 2, 1))
    plan, (x, _, _) = case.program(BFLOAT).main, inputs_of(case, BFLOAT)
    x = x.clone()
    x[0, 300] = number
    named = {**{f"p_{name}": part for name, part in case.parts(BFLOAT).items()}, "x": x}
    tensors = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in named.items()}
    found = torch.from_numpy(run_on_host(plan, launch_of(plan), tensors, tmp_path).copy()).view(BFLOAT)
    assert not found.isfinite().any()


@pytest.mark.parametrize(("behind", "computed"), [("norm ahead", False), ("layer norm ahead", True)])
def test_only_rows_whose_elements_need_all_others_are_computed_ahead(behind: str, computed: bool) -> None:
    plan = Case(n=64, k=1024, zeros=True, behind=behind).program(BFLOAT).main
    text = plan.kernels[launch_of(plan).kernel].text
    assert ("void compute_row(" in text, "float row_octet(" in text) == (computed, not computed)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-4, 1e4, 1e15])
def test_norms_of_small_and_large_rows(size: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = Case(n=64, k=1024, zeros=True, behind="norm ahead")
    force(monkeypatch, IntegerRows(2, 2, 2))
    error, rounding = errors_on_host(case, BFLOAT, inputs_of(case, BFLOAT)[0] * size, tmp_path)
    assert error <= 1.2 * rounding


@pytest.mark.parametrize("at", range(len(FORCED)))
def test_kernels_compile(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, dtype, sizes = FORCED[at]
    force(monkeypatch, sizes)
    plan = case.program(dtype).main
    check_compile([plan.kernels[launch_of(plan).kernel]], 90)


TAKEN = FORCED[0][0]


def test_older_devices_have_another_kernel() -> None:
    assert entries_of(TAKEN) == [(CLUSTERS, "integer_rows"), ("", "grouped_matvec")]


@pytest.mark.parametrize(
    "case",
    [
        replace(TAKEN, kind=torch.float8_e4m3fn),
        replace(TAKEN, n=72),
        replace(TAKEN, k=1000, group=1000),
        replace(TAKEN, group=256),
        replace(TAKEN, rows=16, group=64),
        replace(TAKEN, biases=True, group=64),
        Case(n=64, k=1024, codebook=True),
        Case(n=64, k=1024, bits=6, group=128, zero=32),
    ],
    ids=str,
)
def test_others_are_left_to_the_kernel_for_all_codes(case: Case) -> None:
    plan = case.program(BFLOAT).main
    assert plan.kernels[launch_of(plan).kernel].entry == "grouped_matvec"


def test_sizes_of_a_decoder() -> None:
    """Those that were the quickest where they were timed."""
    gate = Work(17920, 1536, 4, 64, 64, 2, 4, 0)
    assert integer_rows_sizes(gate, H200) == IntegerRows(9, 1, 6, beside=True)
    assert integer_rows_sizes(replace(gate, bits=8, group=0, zero_bits=0), H200) == IntegerRows(8, 1, 5, beside=True)
    down = replace(gate, outputs=1536, k=8960)
    assert integer_rows_sizes(down, H200) == IntegerRows(1, 12, 3)
    assert integer_rows_sizes(replace(down, bits=8, group=0, zero_bits=0), H200) == IntegerRows(1, 18, 2)
    assert integer_rows_sizes(replace(gate, outputs=37888, k=3584), H200) == IntegerRows(8, 1, 8)


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 0)])
def test_sizes_give_all_multiprocessors_work(bits: int, group: int) -> None:
    work = Work(17920, 1536, bits, 64, group, 2, 4 if group else 0, 1536)
    sizes = integer_rows_sizes(work, H200)
    assert sizes is not None
    assert sizes.blocks(work, H200) == H200.cores
    assert sizes.shared_bytes(work, H200) <= H200.shared_bytes
    assert sizes.stages <= sizes.turns(work, H200) * sizes.steps(work)
    assert integer_rows_sizes(replace(work, k=1 << 17, computed=0), H200) is None
