"""Products of 2 to 16 rows by packed codes that come through shared memory: which take them, and what they compute.

What the kernel computes is seen on this machine's processor, thread by thread; on a GPU the cases of
`test_grouped_matvec` run it as well.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import npu_compiler
from cuda_compiler import octets
from cuda_compiler.artifact.extensions import cluster_of, is_beside
from cuda_compiler.artifact.vocabulary import CLUSTERS
from cuda_compiler.devices import DEVICES
from cuda_compiler.launches_ahead import Ahead
from cuda_compiler.products import few_codes
from cuda_compiler.products.few_codes_sizes import FewCodes, Work, few_codes_sizes, held_beside
from npu_compiler import dtypes
from npu_compiler.artifact.plan import KernelCall
from npu_compiler.tensor.expr import Call, Const
from npu_runtime import Device
from tests.cuda.kernels import check_compile, launches_told
from tests.cuda.test_grouped_matvec import Case, errors, inputs_of
from tests.cuda.test_integer_rows import entries_of, errors_on_host, launch_of
from tests.support.host_kernels import HAS_COMPILER, run_on_host
from tests.support.ir_builder import IRBuilder

BFLOAT, HALF = torch.bfloat16, torch.float16
H200 = DEVICES.named("sm_90", "cuda")

GATE = Case(m=8, n=17_920, k=1536, bits=8, kind=torch.int8, group=1536, behind="norm ahead")
OUTPUT = replace(GATE, n=1536, behind="residual")
BEHIND_OUTPUT = (Ahead(96, 69_632, True), Ahead(96, 57_856, True))
BEHIND_ATTENTION = (Ahead(128, 116_736, True, streams=True), Ahead(96, 69_632, True))
"""Products of a byte in a decoder's layer, and the launches ahead of them."""

FORCED: list[tuple[Case, torch.dtype, FewCodes]] = [
    (Case(m=8, n=64, k=1024, bits=8, kind=torch.int8, group=1024), BFLOAT, FewCodes(4, 2, 2)),
    (Case(m=2, n=80, k=1024, zeros=True), BFLOAT, FewCodes(1, 3, 2)),
    (Case(m=16, n=48, k=1280, zeros=True, behind="residual"), BFLOAT, FewCodes(2, 4, 1)),
    (Case(m=5, n=48, k=1024, zeros=True, group=128), HALF, FewCodes(2, 2, 3)),
    (Case(m=9, n=32, k=384, zero=8, group=32), BFLOAT, FewCodes(8, 1, 2)),
    (Case(m=3, n=32, k=768, bits=8, zeros=True), BFLOAT, FewCodes(2, 2, 2)),
    (Case(m=8, n=64, k=768, bits=8, kind=torch.int8, group=128, behind="norm ahead"), BFLOAT, FewCodes(1, 3, 1)),
    (Case(m=4, n=64, k=512, zeros=True, behind="gated"), BFLOAT, FewCodes(8, 1, 2)),
    (Case(m=6, n=32, k=896, bits=8, zero=128, group=896), HALF, FewCodes(8, 1, 1)),
    (Case(m=8, n=80, k=2304, zeros=True, behind="residual"), BFLOAT, FewCodes(2, 2, 2, 4)),
    (Case(m=11, n=48, k=1280, bits=8, kind=torch.int8, group=1280), BFLOAT, FewCodes(3, 1, 1, 2)),
    (Case(m=7, n=32, k=1024, codebook=True), HALF, FewCodes(2, 2, 1)),
    (Case(m=6, n=32, k=768, bits=8, kind=torch.float8_e4m3fn, group=768), BFLOAT, FewCodes(1, 2, 2)),
    (Case(m=4, n=32, k=512, zeros=True, behind="norm ahead"), BFLOAT, FewCodes(1, 4, 1)),
    (Case(m=5, n=4272, k=512, zero=8, behind="bias"), BFLOAT, FewCodes(1, 2, 1)),
    (Case(m=8, n=64, k=768, zero=8, behind="norm ahead"), BFLOAT, FewCodes(4, 1, 3)),
    (Case(m=8, n=160, k=1536, zeros=True, behind="norm ahead"), BFLOAT, FewCodes(9, 2, 2)),
    (Case(m=8, n=96, k=1536, bits=8, kind=torch.int8, group=1536, behind="norm ahead"), BFLOAT, FewCodes(8, 2, 1)),
    (Case(m=5, n=32, k=1280, zeros=True, behind="layer norm ahead"), BFLOAT, FewCodes(2, 3, 2)),
    (Case(m=8, n=64, k=1280, zeros=True, behind="norm ahead"), BFLOAT, FewCodes(4, 4, 2)),
    (Case(m=6, n=48, k=896, zeros=True, group=32), BFLOAT, FewCodes(2, 3, 2)),
    (Case(m=6, n=32, k=768, zeros=True, behind="norm ahead"), HALF, FewCodes(2, 3, 1)),
    (Case(m=8, n=48, k=1024, zeros=True, behind="written norm ahead"), BFLOAT, FewCodes(2, 4, 1)),
    (Case(m=3, n=48, k=2560, zeros=True, behind="norm ahead"), BFLOAT, FewCodes(1, 5, 2)),
    (Case(m=2, n=48, k=512, zeros=True), BFLOAT, FewCodes(1, 9, 2)),
    (Case(m=9, n=32, k=1280, zeros=True), BFLOAT, FewCodes(1, 2, 2)),
    (Case(m=5, n=96, k=768, zero=8, behind="norm ahead"), BFLOAT, FewCodes(3, 3, 3)),
    (
        Case(m=8, n=160, k=1536, bits=8, kind=torch.int8, group=1536, behind="norm ahead"),
        BFLOAT,
        FewCodes(1, 2, 3, in_place=True),
    ),
    (
        Case(m=6, n=48, k=768, bits=8, zero=128, group=128, behind="norm ahead"),
        BFLOAT,
        FewCodes(2, 2, 1, in_place=True),
    ),
    (Case(m=11, n=48, k=1024, zeros=True, behind="residual"), BFLOAT, FewCodes(2, 3, 2, in_place=True)),
    (Case(m=8, n=64, k=1536, zeros=True, behind="residual"), BFLOAT, FewCodes(4, 3, 2)),
    (Case(m=6, n=32, k=768, zeros=True, behind="layer norm ahead"), BFLOAT, FewCodes(1, 2, 2)),
    (Case(m=2, n=160, k=1536, zeros=True, behind="norm ahead"), BFLOAT, FewCodes(9, 2, 2)),
    (Case(m=4, n=80, k=1280, zeros=True, behind="norm ahead"), BFLOAT, FewCodes(5, 4, 2)),
    (Case(m=9, n=80, k=1280, zeros=True, behind="norm ahead"), BFLOAT, FewCodes(5, 4, 2)),
    (Case(m=16, n=160, k=1536, zeros=True, behind="norm ahead"), BFLOAT, FewCodes(9, 2, 2)),
    (Case(m=12, n=64, k=1280, bits=8, kind=torch.int8, group=1280, behind="norm ahead"), BFLOAT, FewCodes(4, 2, 1)),
    (
        Case(m=10, n=80, k=1536, bits=8, kind=torch.int8, group=1536, behind="norm ahead"),
        BFLOAT,
        FewCodes(5, 1, 2, in_place=True),
    ),
]
"""Among them tiles in turns, teams without one, rows that end within a step, shares of several sizes, clusters, blocks
of few warps and of many, norms whose rows wait for their factors and others, rows that end among loads, warps that have
codes to ask for ahead of vectors or behind them, with a part of the vectors and without, parts where codes were,
vectors that sets of warps share, or all in turns, and norms of which half of the warps make the rows, or all of them.
"""


def force(monkeypatch: pytest.MonkeyPatch, sizes: FewCodes) -> None:
    monkeypatch.setattr(few_codes, "few_codes_sizes", lambda work, values, device: sizes)


def put_behind(monkeypatch: pytest.MonkeyPatch, *ahead: Ahead) -> None:
    """Products are lowered as if these were the launches ahead of them."""
    monkeypatch.setattr(few_codes, "launches_ahead", lambda index, lowering: ahead)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize(("case", "dtype", "sizes"), FORCED, ids=str)
def test_threads_on_the_processor_give_the_product(
    case: Case, dtype: torch.dtype, sizes: FewCodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    force(monkeypatch, sizes)
    error, rounding = errors_on_host(case, dtype, inputs_of(case, dtype)[0], tmp_path)
    assert error <= (3.0 if case.behind else 1.2) * rounding


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("factor", [1.0, -1.0, 1e30])
def test_sums_that_are_far_larger_than_results_leave_no_error(
    factor: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Vectors of one sign, whose products by codes with their zero points would be far larger than results."""
    case = Case(m=8, n=64, k=1024, zeros=True)
    force(monkeypatch, FewCodes(2, 2, 2))
    error, rounding = errors_on_host(case, BFLOAT, factor * inputs_of(case, BFLOAT)[0].abs(), tmp_path)
    assert error <= 1.2 * rounding


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_is_no_number_stays_so_in_its_row(number: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = Case(m=3, n=64, k=512, zeros=True)
    force(monkeypatch, FewCodes(4, 2, 1))
    plan, (x, _, _) = case.program(BFLOAT).main, inputs_of(case, BFLOAT)
    x = x.clone()
    x[1, 300] = number
    named = {**{f"p_{name}": part for name, part in case.parts(BFLOAT).items()}, "x": x}
    tensors = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in named.items()}
    found = torch.from_numpy(run_on_host(plan, launch_of(plan), tensors, tmp_path).copy()).view(BFLOAT).reshape(3, 64)
    assert not found[1].isfinite().any()
    assert found[::2].isfinite().all()


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("size", [1e-10, 1e-4, 1e4, 1e15])
def test_norms_of_small_and_large_rows(size: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is multiplied are rows without their norm's factor."""
    case = Case(m=8, n=64, k=1024, zeros=True, behind="norm ahead")
    force(monkeypatch, FewCodes(4, 2, 2))
    error, rounding = errors_on_host(case, BFLOAT, size * inputs_of(case, BFLOAT)[0], tmp_path)
    assert error <= 3.0 * rounding


def test_rows_of_few_exponents_are_computed_with_their_factor() -> None:
    """The elements of a row may be too large for float16 where those of its norm are not."""
    found = {}
    for dtype in (BFLOAT, HALF):
        plan = Case(m=8, n=64, k=1024, zeros=True, behind="norm ahead").program(dtype).main
        text = plan.kernels[launch_of(plan).kernel].text
        found[dtype] = "void compute_row(" in text, "float row_octet(" in text
    assert found == {BFLOAT: (False, True), HALF: (True, False)}


@pytest.mark.parametrize(
    ("behind", "stages", "octets"), [("norm ahead", 2, 1), ("norm ahead", 1, 1), ("", 2, 0), ("layer norm ahead", 2, 0)]
)
def test_rows_of_norms_without_a_mean_are_computed_by_octets(
    behind: str, stages: int, octets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their loads are ahead of those of codes where these have several steps."""
    force(monkeypatch, FewCodes(4, 2, stages))
    plan = Case(m=8, n=64, k=1024, zeros=True, behind=behind).program(BFLOAT).main
    assert ("#define PROLOGUE 2\n" in plan.kernels[launch_of(plan).kernel].text) == bool(octets)


@pytest.mark.parametrize(
    ("behind", "ahead", "beside"),
    [("norm ahead", False, True), ("norm ahead", True, True), ("", True, True), ("", False, False)],
)
def test_blocks_leave_room_where_those_ahead_do_or_no_launch_makes_their_vectors(
    behind: str, ahead: bool, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_behind(monkeypatch, Ahead(96, 116_736, ahead))
    plan = Case(m=8, n=64, k=1024, zeros=True, behind=behind).program(BFLOAT).main
    assert is_beside(launch_of(plan)) == beside


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
def test_products_of_pairs_have_the_bits_of_those_of_floats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = Case(m=8, n=64, k=1024, zeros=True, behind="norm ahead")
    force(monkeypatch, FewCodes(4, 2, 2))
    x, _, norm = inputs_of(case, BFLOAT)
    named = {**{f"p_{name}": part for name, part in case.parts(BFLOAT).items()}, "x": x, "p_norm": norm}
    tensors = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in named.items()}
    found = []
    for by_pairs in (True, False):
        if not by_pairs:
            monkeypatch.setattr(octets, "_before_casts", lambda expr: None)
        plan = case.program(BFLOAT).main
        text = plan.kernels[launch_of(plan).kernel].text
        assert ("left = x0;" in text) == by_pairs
        found.append(run_on_host(plan, launch_of(plan), tensors, tmp_path).copy())
    assert (found[0] == found[1]).all()


def test_factors_are_seen_through_conversions_that_keep_them_alone() -> None:
    number = Const(1.5, dtypes.BFLOAT16)
    kept = Call("cast", (Call("cast", (number,), dtypes.FLOAT32),), dtypes.BFLOAT16)
    rounded = Call("cast", (number,), dtypes.FLOAT16)
    assert octets._before_casts(kept) is number
    assert octets._before_casts(rounded) is rounded


def test_the_mean_of_squares_is_divided_once() -> None:
    """Not each element that is added to it."""
    plan = Case(m=8, n=64, k=1024, zeros=True, behind="written norm ahead").program(BFLOAT).main
    text = plan.kernels[launch_of(plan).kernel].text
    assert text.count("0.0009765625f") == 1
    assert "(sum * 0.0009765625f)" in text


@pytest.mark.parametrize("at", range(len(FORCED)))
def test_kernels_compile(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, dtype, sizes = FORCED[at]
    force(monkeypatch, sizes)
    plan = case.program(dtype).main
    check_compile([plan.kernels[launch_of(plan).kernel]], 90)


TAKEN = Case(m=8, n=4096, k=1024, zeros=True)


def test_older_devices_have_another_kernel() -> None:
    assert entries_of(TAKEN) == [(CLUSTERS, "few_codes"), ("", "grouped_matvec")]


@pytest.mark.parametrize("rows", [2, 4, 9, 16])
def test_two_to_sixteen_rows_are_taken(rows: int) -> None:
    assert entries_of(replace(TAKEN, m=rows)) == [(CLUSTERS, "few_codes"), ("", "grouped_matvec")]


@pytest.mark.parametrize(
    ("rows", "k", "others"),
    [
        (8, 1024, ["grouped_matvec"]),
        (9, 1024, ["rows", "grouped_matvec"]),
        (16, 1536, ["rows", "grouped_matvec"]),
        (8, 3072, ["rows", "grouped_matvec"]),
    ],
)
def test_blocks_compute_rows_that_others_read_from_memory(rows: int, k: int, others: list[str]) -> None:
    """The kernel for all codes does so where it has no room for them."""
    found = entries_of(Case(m=rows, n=2048, k=k, zeros=True, behind="norm ahead"))
    assert found == [(CLUSTERS, "few_codes"), *(("", entry) for entry in others)]


@pytest.mark.parametrize(
    ("case", "dtype", "built_for", "entry"),
    [
        (Case(m=16, n=2048, k=1792, zeros=True), BFLOAT, None, "few_codes"),
        (Case(m=8, n=2048, k=3584, zeros=True), BFLOAT, None, "few_codes"),
        (Case(m=9, n=2048, k=1024, bits=6, group=128, zero=32), BFLOAT, None, "grouped_matvec"),
        (Case(m=9, n=2048, k=1024, zeros=True), HALF, None, "few_codes"),
        (Case(m=9, n=2048, k=1024, zeros=True), BFLOAT, "sm_80", "grouped_matvec"),
    ],
    ids=str,
)
def test_many_rows_have_a_launch_of_their_own(
    case: Case, dtype: torch.dtype, built_for: str | None, entry: str
) -> None:
    """Where each block would compute for longer than that takes, or the kernel for all codes is alone."""
    plan = replace(case, behind="norm ahead").program(dtype, built_for).main
    assert [plan.kernels[call.kernel].entry for call in plan.calls if isinstance(call, KernelCall)] == ["rows", entry]
    assert len(plan.steps) == 2


@pytest.mark.parametrize(
    "case",
    [
        replace(TAKEN, n=4104),
        replace(TAKEN, k=1000, group=1000),
        replace(TAKEN, group=256),
        replace(TAKEN, rows=16, group=64),
        replace(TAKEN, biases=True, zeros=False),
        Case(m=8, n=64, k=1024, bits=6, group=128, zero=32),
    ],
    ids=str,
)
def test_others_are_left_to_the_kernel_for_all_codes(case: Case) -> None:
    plan = case.program(BFLOAT).main
    assert plan.kernels[launch_of(plan).kernel].entry == "grouped_matvec"


@pytest.mark.parametrize("rows", [1, 8])
def test_codes_that_a_kernel_makes_are_not_read_ahead_of_it(rows: int) -> None:
    """The kernels that begin with codes ask for them while the launch ahead of theirs still runs."""
    case, builder = replace(TAKEN, m=rows), IRBuilder()
    codes, scales, zeros = (builder.input(name, part.shape, part.dtype) for name, part in case.parts(BFLOAT).items())
    parts = (builder.call("aten.bitwise_not.default", codes), scales, zeros, None, None)
    weight = builder.call("npu_codes.dequantize.default", *parts, *case.options, BFLOAT)
    ir = builder.build(builder.call("aten.linear.default", builder.input("x", (rows, case.k), BFLOAT), weight))
    plan = npu_compiler.compile(ir, "cuda", "bfloat16").main
    entries = [plan.kernels[call.kernel].entry for call in plan.calls if isinstance(call, KernelCall)]
    assert entries == ["elementwise", "grouped_matvec"]


def test_sizes_give_all_multiprocessors_work() -> None:
    """The sizes that were the quickest where they were timed."""
    gate = Work(17920, 1536, 4, 64, 64, 2, 4, rows=8, is_computed=True)
    assert few_codes_sizes(gate, 2, H200) == FewCodes(9, 2, 2)
    assert few_codes_sizes(replace(gate, bits=8, group=0, zero_bits=0), 2, H200) == FewCodes(9, 1, 2)
    assert few_codes_sizes(replace(gate, outputs=2048), 2, H200) == FewCodes(1, 8, 1)
    down = Work(1536, 8960, 4, 64, 64, 2, 4, rows=8, is_computed=False)
    assert few_codes_sizes(down, 2, H200) == FewCodes(4, 3, 2, 4)
    assert few_codes_sizes(replace(down, bits=8, group=0, zero_bits=0), 2, H200) == FewCodes(4, 3, 2, 4)
    assert few_codes_sizes(replace(down, k=1 << 19), 2, H200) is None


def macros_of(case: Case, *names: str) -> tuple[KernelCall, list[int]]:
    """A product's launch, and what its kernel is told."""
    plan = case.program(BFLOAT).main
    call = launch_of(plan)
    text = plan.kernels[call.kernel].text
    return call, [int(text.split(f"#define {name} ", 1)[1].split("\n", 1)[0]) for name in names]


def test_codes_of_a_byte_come_beside_the_launch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps as there is room for, all but the last one of them ahead of vectors, a little at a time."""
    names, told = ("STAGES", "IN_PLACE", "PACED"), launches_told(monkeypatch, "few_codes")
    put_behind(monkeypatch, *BEHIND_OUTPUT)
    call, found = macros_of(GATE, *names)
    assert (found, told) == ([4, 1, 1], [(True, True)])
    assert call.shared_bytes + BEHIND_OUTPUT[-1].shared_bytes + 2 * 1024 < H200.core_shared_bytes
    for case in (replace(GATE, group=64, bits=4, kind=torch.uint8, zero=8), replace(GATE, behind="layer norm ahead")):
        assert (macros_of(case, *names)[1], told[-1]) == ([2, 0, 0], (True, False))
    for ahead in ((Ahead(96, 116_736, True),), (replace(BEHIND_OUTPUT[-1], beside=False),), ()):
        put_behind(monkeypatch, *ahead)
        assert macros_of(GATE, *names)[1] == [2, 0, 0]


def test_a_launch_between_products_of_a_byte_leaves_room_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are small, and in clusters, of which no two are on one multiprocessor."""
    put_behind(monkeypatch, *BEHIND_ATTENTION)
    call, found = macros_of(OUTPUT, "STAGES", "IN_PLACE", "PACED")
    assert (found, call.shared_bytes) == ([1, 1, 0], BEHIND_OUTPUT[-1].shared_bytes)
    assert cluster_of(call) == (4, 1, 1)
    uneven, computed = replace(OUTPUT, n=1520), replace(OUTPUT, behind="layer norm ahead")
    others = (BEHIND_ATTENTION[:1], BEHIND_ATTENTION[::-1], BEHIND_ATTENTION[:1] * 2, BEHIND_OUTPUT)
    for case, ahead in ((uneven, BEHIND_ATTENTION), (computed, BEHIND_ATTENTION), *((OUTPUT, each) for each in others)):
        put_behind(monkeypatch, *ahead)
        call, found = macros_of(case, "IN_PLACE")
        assert (found, cluster_of(call)) == ([0], (1, 1, 1))
        assert call.shared_bytes == H200.core_shared_bytes // 2


def test_steps_beside_another_block_are_those_that_have_room() -> None:
    work = Work(17_920, 1536, 8, 64, 0, 2, 0, rows=8, is_computed=True)
    sizes = few_codes_sizes(work, 4, H200)
    assert sizes == FewCodes(9, 1, 2)
    assert held_beside(sizes, work, 4, 0, H200) == FewCodes(9, 1, 4, in_place=True)  # more are too much for a block
    assert held_beside(sizes, work, 4, 57_856, H200) == FewCodes(9, 1, 4, in_place=True)
    assert held_beside(sizes, work, 4, 57_872, H200) == FewCodes(9, 1, 3, in_place=True)
    assert held_beside(sizes, work, 4, 100_000, H200) == sizes
    in_turns, shared = replace(work, outputs=35_840), replace(sizes, cluster=4)
    assert held_beside(sizes, in_turns, 4, 0, H200) == sizes
    assert held_beside(shared, work, 4, 0, H200) == shared


@pytest.mark.parametrize(("case", "ahead"), [(GATE, BEHIND_OUTPUT), (OUTPUT, BEHIND_ATTENTION)], ids=str)
def test_error_beside_other_launches(
    case: Case, ahead: tuple[Ahead, ...], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_behind(monkeypatch, *ahead)
    given, plain = errors(case, BFLOAT, device)
    assert given <= 3.0 * plain + 1e-6
