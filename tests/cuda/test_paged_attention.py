"""Attention over keys and values in pages, with the write of a step's own, against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

import npu_compiler
from cuda_runtime.nvrtc import architectures
from npu_compiler.artifact.plan import CallChoice
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import InputError, MissingDependencyError
from npu_runtime import Device, Executor, NPUBuffer
from tests.cuda.kernels import check_plan_compiles
from tests.support.running import host_array

BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@dataclass(frozen=True)
class Sizes:
    """Of one step: `rows` tokens of each of `lanes`, tables of `count` pages of `page` tokens."""

    lanes: int
    count: int
    page: int = 128
    size: int = 128
    groups: int = 2
    shared: int = 6
    rows: int = 1
    pages: int = 40


class Step(torch.nn.Module):
    """Rotates queries and keys, writes keys and values to their pages, and attends to those of each lane."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(
        self,
        x: torch.Tensor,
        angles: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self.sizes
        heads = x.reshape(sizes.lanes, sizes.rows, -1, sizes.size).transpose(1, 2)
        queries, new, beside = heads.split([sizes.shared * sizes.groups, sizes.groups, sizes.groups], dim=1)
        known = positions.clamp(min=0)
        page = torch.gather(tables.long(), 1, torch.div(known, sizes.page, rounding_mode="floor"))
        page = torch.where(positions < 0, sizes.pages, page).reshape(-1)
        place = (known % sizes.page).reshape(-1)
        rows = (
            own.transpose(1, 2).reshape(-1, sizes.groups, sizes.size) for own in (self.rotated(new, angles), beside)
        )
        keys, values = (
            torch.ops.aten.index_put(pool, (page, None, place), own)
            for pool, own in zip((keys, values), rows, strict=True)
        )
        visible = torch.arange(sizes.count * sizes.page) <= positions[..., None]
        seen = [
            pool[tables].transpose(1, 2).reshape(sizes.lanes, sizes.groups, -1, sizes.size) for pool in (keys, values)
        ]
        queries = self.rotated(queries, angles)
        result = F.scaled_dot_product_attention(queries, seen[0], seen[1], visible[:, None], enable_gqa=True)
        return result.transpose(1, 2).reshape(sizes.lanes, sizes.rows, -1), keys, values

    @staticmethod
    def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        cos, sin = angles[:, None].chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def tensors(sizes: Sizes, dtype: torch.dtype, ends: Sequence[int], shares: bool = False) -> dict[str, torch.Tensor]:
    """Inputs of a step whose lanes' last tokens stand at `ends`, nobody's at -1; lanes may share their first pages."""
    generator = torch.Generator().manual_seed(len(ends) + sum(ends))
    pool = (sizes.pages + 1, sizes.groups, sizes.page, sizes.size)
    heads = (sizes.shared + 2) * sizes.groups
    shapes: dict[str, tuple[int, ...]] = {
        "x": (sizes.lanes, sizes.rows, heads * sizes.size),
        "angles": (sizes.lanes, sizes.rows, sizes.size),
    }
    shapes |= {"keys": pool, "values": pool}
    given = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    tables = torch.full((sizes.lanes, sizes.count), sizes.pages, dtype=torch.int32)
    free = torch.randperm(sizes.pages, generator=generator).tolist()
    positions = torch.full((sizes.lanes, sizes.rows), -1)
    common = free.pop()
    for lane, end in enumerate(ends):
        for number in range(end // sizes.page + 1 if end >= 0 else 0):
            is_shared = shares and number == 0 and end - sizes.rows >= sizes.page
            tables[lane, number] = common if is_shared else free.pop()
        if end >= 0:
            positions[lane] = end - sizes.rows + 1 + torch.arange(sizes.rows)
    order = ("x", "angles")
    return {name: given[name] for name in order} | {
        "positions": positions, "tables": tables, "keys": given["keys"], "values": given["values"],
    }  # fmt: skip


def compiled(sizes: Sizes, dtype: torch.dtype) -> CompiledProgram:
    given = tensors(sizes, dtype, [sizes.rows - 1] * sizes.lanes)
    extraction = npu_compiler.extract(Step(sizes).eval(), given)
    return npu_compiler.compile(extraction.ir, "cuda", str(dtype).removeprefix("torch."))


def run(executor: Executor, given: Mapping[str, torch.Tensor], device: Device) -> list[NDArray[np.float64]]:
    inputs = {
        spec.name: NPUBuffer.from_numpy(host_array(given[spec.name], spec.host_dtype.numpy), device, spec=spec)
        for spec in executor.plan.inputs
    }
    outputs = executor.run(inputs)
    return [outputs[spec.name].to_numpy(spec=spec).astype(np.float64) for spec in executor.plan.outputs]


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
]


def check(executor: Executor, sizes: Sizes, given: dict[str, torch.Tensor], device: Device) -> None:
    """Compares a step with PyTorch, and with itself."""
    unit = torch.finfo(given["x"].dtype).eps / 2
    exact = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    results = run(executor, given, device)
    result, keys, values = (t.numpy() for t in Step(sizes)(**exact))
    np.testing.assert_allclose(results[1][:-1], keys[:-1], rtol=2.01 * unit, atol=4 * unit)
    np.testing.assert_allclose(results[2][:-1], values[:-1], rtol=1.01 * unit, atol=1e-5)
    np.testing.assert_allclose(results[0], np.nan_to_num(result), rtol=1.01 * unit, atol=60 * unit)
    again = run(executor, given, device)
    np.testing.assert_array_equal(again[0], results[0])


@BOTH
@pytest.mark.parametrize(("sizes", "cases"), CASES, ids=[str(sizes) for sizes, _ in CASES])
def test_equals_torch(sizes: Sizes, cases: list[list[int]], dtype: torch.dtype, device: Device) -> None:
    executor = Executor(compiled(sizes, dtype), device)
    for ends in cases:
        check(executor, sizes, tensors(sizes, dtype, ends, shares=True), device)


@BOTH
def test_texts_that_write_to_each_others_pages_see_what_all_have_written(dtype: torch.dtype, device: Device) -> None:
    sizes = Sizes(8, 4)
    given = tensors(sizes, dtype, [500] + [-1] * 7)
    given["tables"][:] = given["tables"][0].clone()
    given["positions"][:, 0] = torch.tensor([500, 100, 101, 130, 102, 103, 255, 104])
    check(Executor(compiled(sizes, dtype), device), sizes, given, device)


@pytest.mark.parametrize("sizes", [Sizes(8, 16), Sizes(1, 64, pages=70)], ids=str)
def test_what_devices_without_clusters_run_equals_torch(sizes: Sizes, device: Device) -> None:
    program = compiled(sizes, torch.bfloat16)
    (choice,) = (step for step in program.main.steps if isinstance(step, CallChoice))
    assert [option.requires for option in choice.options[:2]] == ["sm_90", "sm_80"]
    plan = program.main.resolved(lambda choice, kernels: 1)
    executor = Executor(replace(program, functions={"main": plan}), device)
    ends = [8191] if sizes.lanes == 1 else [0, 63, 64, 127, 128, 700, 1023, -1]
    check(executor, sizes, tensors(sizes, torch.bfloat16, ends), device)


@BOTH
def test_a_text_has_the_same_bits_whatever_the_others_are(dtype: torch.dtype, device: Device) -> None:
    sizes = Sizes(8, 16)
    executor = Executor(compiled(sizes, dtype), device)
    together = tensors(sizes, dtype, [700, 63, 64, 127, 128, 0, 1023, -1])
    alone = {name: tensor.clone() for name, tensor in together.items()}
    alone["positions"][1:], alone["tables"][1:] = -1, sizes.pages
    results = [run(executor, given, device)[0][0] for given in (together, alone)]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("page", [41, 1 << 20, -42], ids=str)
def test_a_page_that_there_is_none_of_is_refused(page: int, device: Device) -> None:
    sizes = Sizes(2, 4)
    executor = Executor(compiled(sizes, torch.bfloat16), device)
    given = tensors(sizes, torch.bfloat16, [300, 100])
    given["tables"][0, 1] = page
    with pytest.raises(InputError, match="tables"):
        run(executor, given, device)
    run(executor, tensors(sizes, torch.bfloat16, [300, 100]), device)


@pytest.mark.parametrize("sizes", [Sizes(8, 16), Sizes(1, 16), Sizes(1, 16, rows=128)], ids=str)
def test_nothing_is_gathered(sizes: Sizes) -> None:
    program = compiled(sizes, torch.bfloat16)
    choices = [step for step in program.main.steps if isinstance(step, CallChoice)]
    assert len(choices) == 1
    assert all(len(option.calls) <= 2 for option in choices[0].options)
    pool = (sizes.pages + 1) * sizes.groups * sizes.page * sizes.size * 2
    gathered = sizes.lanes * sizes.count * sizes.page * sizes.groups * sizes.size * 2
    largest = max(buffer.nbytes for buffer in program.main.buffers if buffer.nbytes != pool)
    assert largest < gathered or sizes.rows > 1


@pytest.mark.parametrize("sizes", [sizes for sizes, _ in CASES], ids=str)
def test_kernels_compile(sizes: Sizes) -> None:
    try:
        known = architectures()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    for architecture in (70, 80, 90):
        if architecture in known and (architecture > 70 or sizes == CASES[2][0]):  # old ones take seconds each
            check_plan_compiles(compiled(sizes, torch.bfloat16).main, architecture)
