"""A step of attention over a cache of keys and values in codes, which it updates: for the tests of every target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from npu_compiler.frontend.cache_forms import RowForm, copied, row_form

__all__ = ["CodedStep", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Of a step: queries and new keys of `rows` tokens, a cache of `length` positions."""

    length: int
    size: int = 64
    groups: int = 2
    shared: int = 3
    rows: int = 1
    causal: bool = False


class CodedStep(torch.nn.Module):
    """Keys are turned, rounded and written, like values; then queries, turned alike, meet the cache.

    Attributes:
        form: What the cache holds.
    """

    def __init__(self, sizes: Sizes, kind: str, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.sizes, self.dtype = sizes, dtype
        self.form: RowForm = row_form(kind, dtype)
        self.eval()

    def forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        turn: torch.Tensor,
        positions: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        form, each = self.form, self.form.tensors
        rows = (*form.pack(keys * turn), *form.pack(values))
        held = tuple(copied(cache, positions, new) for cache, new in zip(caches, rows, strict=True))
        seen = torch.arange(self.sizes.length) <= positions[:, None]
        numbers = form.numbers(held[:each]), form.numbers(held[each:])
        return (F.scaled_dot_product_attention(queries * turn, *numbers, seen, enable_gqa=True), *held)

    def inputs(self, position: int) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], ...]:
        """Seeded inputs of a step whose first token goes to a position."""
        sizes, generator = self.sizes, torch.Generator().manual_seed(position)

        def made(heads: int, rows: int) -> torch.Tensor:
            return torch.randn(1, heads, rows, sizes.size, generator=generator).to(self.dtype)

        queries = made(sizes.groups * sizes.shared, sizes.rows)
        new = made(sizes.groups, sizes.rows), made(sizes.groups, sizes.rows)
        turn = torch.randn(sizes.rows, sizes.size, generator=generator).to(self.dtype)
        caches = (*self.form.pack(made(sizes.groups, sizes.length)), *self.form.pack(made(sizes.groups, sizes.length)))
        return queries, *new, turn, position + torch.arange(sizes.rows), caches
