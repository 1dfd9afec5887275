"""Attention of a decode step, which rotates queries and writes its cache itself, against PyTorch in float64."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

import npu_compiler
from cuda_compiler.artifact.extensions import cluster_of, is_beside
from cuda_compiler.attention import decode, lowering
from cuda_compiler.launches_ahead import Ahead
from cuda_runtime.nvrtc import architectures
from npu_compiler.artifact.plan import CallChoice, ExecutionPlan, KernelCall
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import MissingDependencyError
from npu_runtime import Device, Executor, NPUBuffer
from tests.cuda.kernels import check_plan_compiles, launches_told
from tests.support.coded_cache import host_numbers
from tests.support.host_kernels import HAS_COMPILER
from tests.support.host_outputs import outputs_on_host
from tests.support.running import host_array

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@dataclass(frozen=True)
class Sizes:
    """Of one step: queries and new keys of `rows` tokens, of `length` positions, values `wide` times as long."""

    length: int
    size: int = 128
    groups: int = 2
    shared: int = 6
    rows: int = 1
    batch: int = 1
    mask: str = "boolean"
    wide: int = 1

    @property
    def width(self) -> int:
        return (self.shared + 1 + self.wide) * self.groups * self.size


class Step(torch.nn.Module):
    """Rotary embedding, the cache write and attention, behind a projection of all three at once."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self.sizes
        heads = [sizes.shared * sizes.groups, sizes.groups, sizes.groups * sizes.wide]
        queries, new, beside = self.heads_of(x).split(heads, dim=1)
        keys = keys.index_copy(2, positions, rotated(new, cos, sin))
        if sizes.wide > 1:
            beside = beside.unflatten(1, (sizes.groups, sizes.wide)).transpose(2, 3).flatten(3)
        values = values.index_copy(2, positions, beside)
        queries = rotated(queries, cos, sin)
        result = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=True)
        return self.finish(result.transpose(1, 2).reshape(sizes.batch, sizes.rows, -1), keys), keys, values

    def heads_of(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(self.sizes.batch, self.sizes.rows, -1, self.sizes.size).transpose(1, 2)

    def finish(self, result: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return result


class Strided(Step):
    """A step in whose projection neighbours of a row lie apart."""

    def heads_of(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(self.sizes.batch, self.sizes.rows, self.sizes.size, -1).permute(0, 3, 1, 2)


class ReadTwice(Step):
    """A step whose updated keys are read by something else, too."""

    def finish(self, result: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return result + keys.amax(dim=(1, 2, 3)).reshape(-1, 1, 1)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def tensors(sizes: Sizes, dtype: torch.dtype, position: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of a step whose first token goes to a position."""
    generator = torch.Generator().manual_seed(position)
    cache = (sizes.batch, sizes.groups, sizes.length, sizes.size)
    shapes = {
        "x": (sizes.batch, sizes.rows, sizes.width),
        "cos": (sizes.rows, sizes.size),
        "sin": (sizes.rows, sizes.size),
        "keys": cache,
        "values": (*cache[:3], sizes.size * sizes.wide),
    }
    given = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    given["positions"] = position + torch.arange(sizes.rows)
    open_up_to = torch.arange(sizes.length) <= given["positions"][:, None]
    if sizes.mask == "boolean":
        given["mask"] = open_up_to[None, None]
    elif sizes.mask == "numbers":
        closed = torch.where(open_up_to, 0.0, float("-inf"))
        given["mask"] = (closed + torch.randn((1, sizes.shared * sizes.groups, 1, 1), generator=generator)).to(dtype)
    elif sizes.mask == "window":
        given["mask"] = (open_up_to & (torch.arange(sizes.length) > given["positions"][:, None] - 70))[None, None]
    elif sizes.mask == "hole":
        hole = (torch.arange(sizes.length) >= 20) & (torch.arange(sizes.length) < 70)
        given["mask"] = (open_up_to & ~hole)[None, None]
    elif sizes.mask == "closed":
        given["mask"] = torch.zeros((1, 1, sizes.rows, sizes.length), dtype=torch.bool)
    return given


def compiled(sizes: Sizes, dtype: torch.dtype, step: type[Step] = Step) -> CompiledProgram:
    extraction = npu_compiler.extract(step(sizes).eval(), tensors(sizes, dtype))
    return npu_compiler.compile(extraction.ir, "cuda", str(dtype).removeprefix("torch."))


def run(executor: Executor, given: Mapping[str, torch.Tensor], device: Device) -> list[NDArray[np.float64]]:
    """All outputs: the result and both caches."""
    inputs = {
        spec.name: NPUBuffer.from_numpy(host_array(given[spec.name], spec.host_dtype.numpy), device, spec=spec)
        for spec in executor.plan.inputs
    }
    outputs = executor.run(inputs)
    return [outputs[spec.name].to_numpy(spec=spec).astype(np.float64) for spec in executor.plan.outputs]


def check(sizes: Sizes, dtype: torch.dtype, positions: list[int], device: Device, step: type[Step] = Step) -> None:
    executor = Executor(compiled(sizes, dtype, step), device)
    for position in positions:
        given = tensors(sizes, dtype, position)
        results = run(executor, given, device)
        check_results(results, sizes, dtype, given, step)
        again = run(executor, given, device)
        assert all(np.array_equal(a, b) for a, b in zip(results, again, strict=True))


def check_results(
    results: list[NDArray[np.float64]],
    sizes: Sizes,
    dtype: torch.dtype,
    given: Mapping[str, torch.Tensor],
    step: type[Step] = Step,
) -> None:
    """Compares the result and both caches with PyTorch in float64."""
    unit = torch.finfo(dtype).eps / 2
    exact = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    result, keys, values = step(sizes)(**exact)
    closed = result.isnan() if sizes.mask == "closed" else torch.zeros_like(result, dtype=torch.bool)
    np.testing.assert_allclose(results[1], keys.numpy(), rtol=unit * 1.01, atol=1e-5)
    np.testing.assert_allclose(results[2], values.numpy(), rtol=unit * 1.01, atol=1e-5)
    # rounded queries and keys change a score by up to some units of its own size, and so a weight
    np.testing.assert_allclose(results[0], result.masked_fill(closed, 0.0).numpy(), rtol=unit * 1.01, atol=40 * unit)


@BOTH
@pytest.mark.parametrize(
    ("sizes", "positions"),
    [
        (Sizes(2048), [0, 1, 15, 16, 63, 64, 127, 128, 1000, 2000, 2047]),
        (Sizes(2040), [0, 2039]),
        (Sizes(9000), [0, 128, 4095, 4096, 8191, 8999]),
        (Sizes(300, size=64, groups=3, shared=1), [0, 77, 299]),
        (Sizes(300, size=96, groups=1, shared=8), [0, 77, 299]),
        (Sizes(300, size=80, groups=4, shared=7), [0, 299]),
        (Sizes(128, size=128, groups=2, shared=2, batch=2), [0, 100, 127]),
        (Sizes(700, size=64, groups=2, shared=4, rows=3, batch=2), [0, 13, 62, 697]),
        (Sizes(700, size=128, groups=1, shared=8, rows=2), [0, 15, 698]),
        (Sizes(40, size=256, groups=1, shared=4), [0, 39]),
        (Sizes(1000, mask="numbers"), [0, 500, 999]),
        (Sizes(1000, mask="window"), [0, 69, 500, 999]),
        (Sizes(1000, mask="closed"), [0, 999]),
        (Sizes(4200, mask="closed"), [0, 4199]),
        (Sizes(333, mask="none"), [0, 332]),
        (Sizes(5000, groups=1, shared=5, mask="none"), [4999]),
        (Sizes(2048, rows=8), [0, 5, 60, 128, 1000, 2040]),
        (Sizes(2048, rows=16), [0, 60, 128, 2032]),
        (Sizes(300, size=64, groups=3, shared=4, rows=9, mask="numbers"), [0, 9, 291]),
        (Sizes(700, rows=3, batch=2), [0, 62, 697]),
        (Sizes(300, size=64, groups=3, shared=4, rows=7, mask="numbers"), [0, 9, 293]),
        (Sizes(9000, size=32, groups=1, shared=2, rows=8, wide=4), [0, 4095, 8990]),
        (Sizes(300, size=64, groups=2, shared=4, rows=2, wide=2), [0, 77, 298]),
    ],
    ids=str,
)
def test_equals_torch(sizes: Sizes, positions: list[int], dtype: torch.dtype, device: Device) -> None:
    check(sizes, dtype, positions, device)


@pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")
@pytest.mark.parametrize(
    ("sizes", "positions", "rows"),
    [
        (Sizes(128, size=64, rows=8), [0, 13, 120], 8),
        (Sizes(100, size=32, groups=1, shared=4, rows=3, batch=2), [0, 62, 97], 6),
        (Sizes(128, size=32, shared=12, mask="numbers"), [15, 127], 6),
        (Sizes(128, size=64, groups=1, shared=3, rows=9), [0, 60, 119], 9),
        (Sizes(100, size=32, groups=1, shared=2, rows=16, batch=2), [0, 40, 84], 16),
    ],
    ids=str,
)
def test_on_a_processor_a_head_of_keys_has_groups_of_few_rows(
    sizes: Sizes, positions: list[int], rows: int, tmp_path: Path
) -> None:
    """Thread by thread; in groups of so many rows."""
    plan = on_host(sizes)
    assert launch_of(plan).grid[2] == sizes.batch * sizes.groups * sizes.shared * sizes.rows // rows
    for position in positions:
        check_on_host(plan, sizes, position, tmp_path)


@pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")
@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize(
    ("sizes", "positions", "blocks", "clusters"),
    [
        (Sizes(256, size=32, shared=2), [0, 130, 255], 2, 1),
        (Sizes(256, size=24, groups=1, shared=8), [130], 2, 1),
        (Sizes(600, size=64, groups=1, shared=3, rows=2), [14, 127, 598], 8, 1),
        (Sizes(600, size=32, groups=1, shared=2, mask="window"), [100, 599], 8, 1),
        (Sizes(2048, size=32, groups=1, shared=2, mask="window"), [63, 2047], 8, 1),
        (Sizes(600, size=32, groups=1, shared=2, mask="hole"), [250, 599], 8, 1),
        (Sizes(2100, size=32, groups=1, shared=2, mask="window"), [40, 2099], 8, 1),
        (Sizes(4200, size=32, groups=1, shared=2), [200, 4199], 8, 5),
        (Sizes(4200, size=32, groups=1, shared=2, rows=8, wide=4), [4190], 8, 5),
    ],
    ids=str,
)
def test_on_a_processor_blocks_of_clusters_put_their_parts_together(
    sizes: Sizes, positions: list[int], blocks: int, clusters: int, backwards: bool, tmp_path: Path
) -> None:
    """Thread by thread, in either order of threads."""
    plan = on_host(sizes)
    assert cluster_of(launch_of(plan))[0] == blocks
    assert launch_of(plan).grid[0] == blocks * clusters
    for position in positions:
        check_on_host(plan, sizes, position, tmp_path, backwards)


@pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")
@pytest.mark.parametrize("sizes", [Sizes(128, size=32), Sizes(128, size=24, groups=1, shared=2, rows=4)], ids=str)
def test_on_a_processor_neighbours_come_from_anywhere(sizes: Sizes, tmp_path: Path) -> None:
    for position in (0, 77):
        check_on_host(on_host(sizes, Strided), sizes, position, tmp_path, step=Strided)


@pytest.mark.parametrize(("step", "packs"), [(Step, 5), (Strided, 2)])
def test_neighbours_are_loaded_at_once_where_they_lie_side_by_side(step: type[Step], packs: int) -> None:
    """Queries, these again from either half, cosines and sines; the last two alone."""
    plan = on_host(Sizes(128, rows=8), step)
    text = plan.kernels[launch_of(plan).kernel].text
    function, _ = re.findall(r"void query_pack\(.*?\n}\n", text, re.DOTALL)
    assert function.count("load_pack<4>(") == packs


def test_blocks_on_most_multiprocessors_leave_room_to_launches_that_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of a warp is on its way, not two, where a step has several tokens."""
    several, one = Sizes(2048, rows=8), Sizes(2048)
    pieces = {}
    for beside in (False, True):
        ahead = (Ahead(128, 116_736, beside),)
        monkeypatch.setattr(decode, "launches_ahead", lambda index, lowering, ahead=ahead: ahead)
        calls = [launch_of(on_host(sizes)) for sizes in (several, one)]
        assert [is_beside(call) for call in calls] == [beside, False]
        pieces[beside] = [call.shared_bytes for call in calls]
    assert pieces[False] == [2 * pieces[True][0], pieces[True][1]]


def test_behind_what_streams_the_next_launch_begins_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks would crowd where those of the product ahead have ended."""
    monkeypatch.setattr(lowering, "_is_ready", lambda *_: True)
    hurried = launches_told(monkeypatch, "attention_decode")
    found = []
    for streams in (False, True):
        ahead = (Ahead(128, 116_736, True, streams),)
        monkeypatch.setattr(decode, "launches_ahead", lambda index, lowering, ahead=ahead: ahead)
        plan = on_host(Sizes(2048, rows=8))
        text = plan.kernels[launch_of(plan).kernel].text
        found.append(["#define EARLY 1\n" in text, "#define HURRIES 1\n" in text])
    assert found == [[True, True], [True, False]]
    assert hurried == [(True, False), (False, False)]


def test_all_blocks_find_room_at_once() -> None:
    """Those that are more than multiprocessors have one piece of a warp on its way, or pieces that are short."""
    few, many, short = (
        launch_of(on_host(sizes))
        for sizes in (
            Sizes(2048, rows=8),
            Sizes(2048, rows=8, groups=4, shared=7),
            Sizes(2048, size=64, rows=8, groups=4, shared=7),
        )
    )
    assert few.grid[0] * few.grid[2] <= 112 < many.grid[0] * many.grid[2]
    assert few.shared_bytes == 2 * many.shared_bytes
    assert many.shared_bytes < short.shared_bytes * 2 <= 200 << 10


def on_host(sizes: Sizes, step: type[Step] = Step) -> ExecutionPlan:
    """The plan of a step for the best devices."""
    return compiled(sizes, torch.bfloat16, step).main.resolved(lambda choice, kernels: 0)


def launch_of(plan: ExecutionPlan) -> KernelCall:
    """That of attention."""
    calls = [call for call in plan.calls if isinstance(call, KernelCall)]
    (call,) = (call for call in calls if plan.kernels[call.kernel].entry == "attention_decode")
    return call


def check_on_host(
    plan: ExecutionPlan,
    sizes: Sizes,
    position: int,
    folder: Path,
    backwards: bool = False,
    step: type[Step] = Step,
) -> None:
    """Runs a step thread by thread and compares with PyTorch in float64."""
    given = tensors(sizes, torch.bfloat16, position)
    faults, results = outputs_on_host(plan, (given[spec.name] for spec in plan.inputs), folder, backwards)
    assert not faults.any()
    check_results(results, sizes, torch.bfloat16, given, step)


@pytest.mark.skipif(not HAS_COMPILER, reason="needs g++")
@pytest.mark.parametrize("lost", range(3))
def test_on_a_processor_a_new_row_without_a_place_is_told_of_and_not_written(lost: int, tmp_path: Path) -> None:
    sizes = Sizes(256, size=32, shared=2, rows=3)
    given = tensors(sizes, torch.bfloat16, 130)
    given["positions"][lost] = sizes.length
    plan = on_host(sizes)
    faults, (_, *caches) = outputs_on_host(plan, (given[spec.name] for spec in plan.inputs), tmp_path)
    assert faults.any()
    for name, cache in zip(("keys", "values"), caches, strict=True):
        differs = cache != host_numbers(given[name]).astype(np.float64)
        rows = np.flatnonzero(differs.reshape(-1, sizes.length, sizes.size).any(axis=(0, 2)))
        assert list(rows) == [130 + row for row in range(3) if row != lost]


@BOTH
def test_keys_that_are_read_twice_are_written_before(dtype: torch.dtype, device: Device) -> None:
    check(Sizes(500), dtype, [0, 300, 499], device, ReadTwice)


def test_keys_that_are_read_twice_are_not_made_by_attention() -> None:
    steps = compiled(Sizes(500), torch.bfloat16, ReadTwice).main.steps
    (choice,) = (step for step in steps if isinstance(step, CallChoice))
    written = {argument.buffer for call in choice.preferred.calls for argument in call.args if argument.writes}
    assert len(written) == 1


def test_a_step_is_one_launch_behind_the_states_of_its_mask() -> None:
    steps = compiled(Sizes(2048), torch.bfloat16).main.steps
    assert len(steps) == 2
    choice = steps[1]
    assert isinstance(choice, CallChoice)
    assert [len(option.calls) for option in choice.options] == [1, 2]


@pytest.mark.parametrize(
    "sizes",
    [Sizes(2100, rows=9), Sizes(300, size=60)],
    ids=["many rows of a long cache", "odd size"],
)
def test_what_does_not_suit_runs_everywhere(sizes: Sizes) -> None:
    assert not any(isinstance(step, CallChoice) for step in compiled(sizes, torch.float16).main.steps)


@pytest.mark.parametrize(("sizes", "groups"), [(Sizes(2100, rows=8), 6), (Sizes(2048, rows=16), 12)], ids=str)
def test_more_rows_are_taken_over_short_caches_than_over_long_ones(sizes: Sizes, groups: int) -> None:
    assert launch_of(on_host(sizes)).grid[2] == groups


@pytest.mark.parametrize("mask", ["boolean", "numbers", "none"])
@pytest.mark.parametrize(
    "sizes", [Sizes(9000), Sizes(700, 64, 2, 4, 3, 2), Sizes(300, 80, 4, 7), Sizes(2048, rows=8)], ids=str
)
def test_kernels_compile(sizes: Sizes, mask: str) -> None:
    try:
        known = architectures()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    program = compiled(Sizes(**{**sizes.__dict__, "mask": mask}), torch.float16)
    for architecture in {70, 80, 90} & set(known):
        check_plan_compiles(program.main, architecture)
