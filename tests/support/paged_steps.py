"""A step of attention over keys and values in pages, which it writes to: for the tests of every target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from npu_compiler.frontend.cache_forms import RowForm, row_form

__all__ = ["PagedStep", "Sizes", "step_inputs"]


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


class PagedStep(torch.nn.Module):
    """Rotates queries and keys, writes keys and values to their pages, and attends to those of each lane.

    Attributes:
        form: What pages hold.
    """

    def __init__(self, sizes: Sizes, kind: str = "16", dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.sizes = sizes
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
        sizes, form, each = self.sizes, self.form, self.form.tensors
        heads = x.reshape(sizes.lanes, sizes.rows, -1, sizes.size).transpose(1, 2)
        queries, new, beside = heads.split([sizes.shared * sizes.groups, sizes.groups, sizes.groups], dim=1)
        known = positions.clamp(min=0)
        page = torch.gather(tables.long(), 1, torch.div(known, sizes.page, rounding_mode="floor"))
        page = torch.where(positions < 0, sizes.pages, page).reshape(-1)
        at = (page, None, (known % sizes.page).reshape(-1))
        rows = [
            own.transpose(1, 2).reshape(-1, sizes.groups, sizes.size) for own in (self.rotated(new, angles), beside)
        ]
        packed = (*form.pack(rows[0]), *form.pack(rows[1]))
        pools = tuple(torch.ops.aten.index_put(pool, at, own) for pool, own in zip(pools, packed, strict=True))
        visible = torch.arange(sizes.count * sizes.page) <= positions[..., None]
        seen = [
            form.numbers(tuple(pool[tables] for pool in part))
            .transpose(1, 2)
            .reshape(sizes.lanes, sizes.groups, -1, sizes.size)
            for part in (pools[:each], pools[each:])
        ]
        queries = self.rotated(queries, angles)
        result = F.scaled_dot_product_attention(queries, seen[0], seen[1], visible[:, None], enable_gqa=True)
        return (result.transpose(1, 2).reshape(sizes.lanes, sizes.rows, -1), *pools)

    @staticmethod
    def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        cos, sin = angles[:, None].chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def step_inputs(step: PagedStep, ends: Sequence[int], shares: bool = False) -> dict[str, torch.Tensor]:
    """Inputs of a step whose lanes' last tokens stand at `ends`, nobody's at -1; lanes may share their first pages."""
    sizes, form = step.sizes, step.form
    generator = torch.Generator().manual_seed(len(ends) + sum(ends))

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(form.dtype)

    heads = (sizes.shared + 2) * sizes.groups
    x, angles = made(sizes.lanes, sizes.rows, heads * sizes.size), made(sizes.lanes, sizes.rows, sizes.size)
    pool = (sizes.pages + 1, sizes.groups, sizes.page, sizes.size)
    pools = (*form.pack(made(*pool)), *form.pack(made(*pool)))
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
