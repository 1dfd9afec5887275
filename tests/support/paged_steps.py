"""A step of attention over keys and values in pages, which it writes to: for the tests of every target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

import npu_compiler
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.frontend.cache_forms import RowForm, row_form
from npu_runtime import Device, Executor, NPUBuffer
from tests.support.coded_cache import host_numbers, neighbours

__all__ = ["Inputs", "PagedStep", "Sizes", "check_paged_step", "check_results", "compiled_step"]
__all__ += ["run_step", "step_inputs"]

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Of one step: `rows` tokens of each of `lanes`, tables of `count` pages of `page` tokens.

    Values are `wide` times as long as keys.
    """

    lanes: int
    count: int
    page: int = 128
    size: int = 128
    groups: int = 2
    shared: int = 6
    rows: int = 1
    pages: int = 40
    wide: int = 1

    @property
    def heads(self) -> list[int]:
        """Of queries, new keys and new values, `size` elements each."""
        return [self.shared * self.groups, self.groups, self.groups * self.wide]

    @property
    def widths(self) -> tuple[int, int]:
        """Of a key and of a value."""
        return self.size, self.size * self.wide


class PagedStep(torch.nn.Module):
    """Rotates queries and keys, writes keys and values to their pages, and attends to those of each lane.

    Attributes:
        kind: What pages hold, as `row_form` takes it.
        form: The same.
    """

    def __init__(self, sizes: Sizes, kind: str = "16", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.sizes, self.kind = sizes, kind
        self.form: RowForm = row_form(kind, dtype)
        self.eval()

    def forward(
        self,
        x: torch.Tensor,
        angles: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        pools: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        sizes, form = self.sizes, self.form
        _, new, beside = self.heads(x)
        known = positions.clamp(min=0)
        page = torch.gather(tables.long(), 1, torch.div(known, sizes.page, rounding_mode="floor"))
        page = torch.where(positions < 0, sizes.pages, page).reshape(-1)
        at = (page, None, (known % sizes.page).reshape(-1))
        rows = [
            own.transpose(1, 2).reshape(-1, sizes.groups, width)
            for own, width in zip((self.rotated(new, angles), beside), sizes.widths, strict=True)
        ]
        packed = (*form.pack(rows[0]), *form.pack(rows[1]))
        pools = tuple(torch.ops.aten.index_put(pool, at, own) for pool, own in zip(pools, packed, strict=True))
        return (self.attended(x, angles, positions, tables, pools), *pools)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, new keys and new values [lanes, heads, rows, size]."""
        sizes = self.sizes
        heads = x.reshape(sizes.lanes, sizes.rows, -1, sizes.size).transpose(1, 2)
        parts: tuple[torch.Tensor, ...] = heads.split(sizes.heads, dim=1)
        return parts

    def attended(
        self,
        x: torch.Tensor,
        angles: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        pools: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """What the queries give over pools that hold what is new."""
        sizes, form, each = self.sizes, self.form, self.form.tensors
        visible = torch.arange(sizes.count * sizes.page) <= positions[..., None]
        seen = [
            form.numbers(tuple(pool[tables] for pool in part))
            .transpose(1, 2)
            .reshape(sizes.lanes, sizes.groups, -1, width)
            for part, width in zip((pools[:each], pools[each:]), sizes.widths, strict=True)
        ]
        queries = self.rotated(self.heads(x)[0], angles)
        result = F.scaled_dot_product_attention(queries, seen[0], seen[1], visible[:, None], enable_gqa=True)
        return result.transpose(1, 2).reshape(sizes.lanes, sizes.rows, -1)

    @staticmethod
    def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        cos, sin = angles[:, None].chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def step_inputs(step: PagedStep, ends: Sequence[int], shares: bool = False) -> Inputs:
    """Inputs of a step whose lanes' last tokens stand at `ends`, nobody's at -1; lanes may share their first pages."""
    sizes, form = step.sizes, step.form
    generator = torch.Generator().manual_seed(len(ends) + sum(ends))

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(form.dtype)

    width = sum(sizes.heads) * sizes.size
    x, angles = made(sizes.lanes, sizes.rows, width), made(sizes.lanes, sizes.rows, sizes.size)
    keys, values = (made(sizes.pages + 1, sizes.groups, sizes.page, width) for width in sizes.widths)
    pools = (*form.pack(keys), *form.pack(values))
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
    return {"x": x, "angles": angles, "positions": positions, "tables": tables, "pools": pools}


def compiled_step(step: PagedStep, target: str) -> CompiledProgram:
    """The step's program, which updates the pools in place."""
    given = step_inputs(step, [step.sizes.rows - 1] * step.sizes.lanes)
    ir = npu_compiler.extract(step, tuple(given.values())).ir
    program = npu_compiler.compile(ir, target, str(step.form.dtype).removeprefix("torch."))
    assert len(program.main.state) == len(given["pools"])
    return program


def run_step(executor: Executor, given: Mapping[str, Any], device: Device) -> list[NDArray[np.float64]]:
    """The result, and the pools behind it."""
    flat = [*(value for name, value in given.items() if name != "pools"), *given["pools"]]
    inputs = {
        spec.name: NPUBuffer.from_numpy(host_numbers(tensor), device, spec=spec)
        for spec, tensor in zip(executor.plan.inputs, flat, strict=True)
    }
    outputs = executor.run(inputs)
    return [np.asarray(outputs[spec.name].to_numpy(spec=spec)).astype(np.float64) for spec in executor.plan.outputs]


def check_paged_step(executor: Executor, step: PagedStep, given: Inputs, device: Device) -> None:
    """Compares a step with PyTorch, and with itself."""
    found = run_step(executor, given, device)
    check_results(step, given, found)
    np.testing.assert_array_equal(run_step(executor, given, device)[0], found[0])


def check_results(step: PagedStep, given: Inputs, found: Sequence[NDArray[np.float64]]) -> None:
    """Compares what a step gives, and the pools behind it, with PyTorch in float64 over what these then hold."""
    result, *pools = found
    unit = torch.finfo(step.form.dtype).eps / 2
    exact = PagedStep(step.sizes, step.kind, torch.float64)
    wide = {name: value.double() if name in ("x", "angles") else value for name, value in given.items()}
    wide["pools"] = tuple(pool if pool.dtype.itemsize == 1 else pool.double() for pool in given["pools"])
    for after, wanted in zip(pools, exact(**wide)[1:], strict=True):
        numbers, least = wanted.double().numpy(), 4 * unit if step.form.tensors == 1 else 0.0
        apart = 2 * neighbours(
            numbers, wanted.dtype, unit
        )  # they are rounded before, and the largest of their row is too
        allowed = np.maximum(apart, least)
        assert (np.abs(after - numbers) <= allowed)[:-1].all()  # the last page is nobody's
    held = tuple(torch.from_numpy(pool) for pool in pools)
    seen = exact.attended(**wide | {"pools": held}).numpy()
    np.testing.assert_allclose(result, np.nan_to_num(seen), rtol=1.01 * unit, atol=60 * unit)
