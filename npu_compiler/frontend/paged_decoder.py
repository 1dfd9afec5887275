"""A language model whose keys and values lie in pages that many texts share: a pure function of a batch of lanes."""

from __future__ import annotations

from typing import Any

import torch

from npu_compiler.frontend.cache_forms import PlainRows, RowForm
from npu_compiler.frontend.cached_decoder import CacheLayer, run_decoder

__all__ = ["PagedDecoder"]


class PagedDecoder(torch.nn.Module):
    """Some tokens of each lane: their keys and values go into its pages, and their logits come out.

    A lane's table names its pages in order, so that position p lies in page ``tables[lane, p // T]`` at place p % T. A
    token sees its lane's positions up to its own. A token at position -1 is nobody's: it sees nothing, and its keys and
    values go to the last page, which no table of a running lane names.
    """

    def __init__(self, model: Any, form: RowForm | None = None, *, fills: bool = False) -> None:
        """Wraps a model.

        Args:
            model: One of transformers' `AutoModelForCausalLM`.
            form: What pages hold, if not numbers.
            fills: Whether pages are all that is wanted, and no logits.
        """
        super().__init__()
        self.model, self._fills = model, fills
        self._form: RowForm = form or PlainRows(model.dtype)
        self.eval()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        pools: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Runs the model.

        Args:
            tokens: int64 [B, N].
            positions: int64 [B, N], each of its lane's text, or -1.
            tables: int32 [B, C], numbers of pages.
            pools: For each layer, the pages of its keys [P + 1, G, T, D] and of its values [P + 1, G, T, E]; each in as
                many tensors as their form has.

        Returns:
            The logits [B, N, V], if wanted; and the new pools in the order of the given ones.
        """
        pages = _Pages(positions, tables, *(pools[0].shape[i] for i in (0, 2)))
        each = 2 * self._form.tensors
        layers = [_PagedLayer(pools[at : at + each], pages, self._form) for at in range(0, len(pools), each)]
        visible = torch.arange(pages.length) <= positions[..., None]
        made = run_decoder(self.model, layers, None, tokens, visible[:, None], positions.clamp(min=0))
        return made[1:] if self._fills else made


class _Pages:
    """Where the tokens of a call go, and which pages each lane sees: the same for all layers.

    Attributes:
        tables: int32 [B, C].
        size: Tokens of a page.
        page, place: Of each token, lane by lane: int64 [B * N].
    """

    def __init__(self, positions: torch.Tensor, tables: torch.Tensor, count: int, size: int) -> None:
        self.tables, self.size = tables, size
        known = positions.clamp(min=0)
        page = torch.gather(tables.long(), 1, torch.div(known, size, rounding_mode="floor"))
        page = torch.where(positions < 0, count - 1, page)
        self.page, self.place = page.reshape(-1), (known % size).reshape(-1)

    @property
    def length(self) -> int:
        """Positions of a lane."""
        return int(self.tables.shape[1]) * self.size

    def put(self, pools: tuple[torch.Tensor, ...], new: torch.Tensor, form: RowForm) -> tuple[torch.Tensor, ...]:
        """The pools that hold rows, with what is new [B, G, N, D]."""
        rows = form.pack(new.transpose(1, 2).reshape(-1, new.shape[1], new.shape[3]))
        at = (self.page, None, self.place)
        return tuple(torch.ops.aten.index_put(pool, at, own) for pool, own in zip(pools, rows, strict=True))

    def seen(self, pools: tuple[torch.Tensor, ...], form: RowForm) -> torch.Tensor:
        """All that each lane has [B, G, L, D]; which of it is read, and from where, is the compiler's to say.

        Numbers are made page by page, so that the compiler sees that they are the same wherever their page lies.
        """
        pages = form.numbers(tuple(pool[self.tables] for pool in pools))
        lanes, count, heads, size, width = pages.shape
        return pages.transpose(1, 2).reshape(lanes, heads, count * size, width)


class _PagedLayer(CacheLayer):
    """Makes new pools of the old ones; that they share memory is the compiler's to prove."""

    def __init__(self, held: tuple[torch.Tensor, ...], pages: _Pages, form: RowForm) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors, self._pages, self._form = held, pages, form
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what the mask covers."""
        return self._pages.length, 0

    def get_max_length(self) -> int:
        """Positions of a lane."""
        return self._pages.length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages, form, each = self._pages, self._form, self._form.tensors
        held = pages.put(self.tensors[:each], key_states, form), pages.put(self.tensors[each:], value_states, form)
        self.tensors = (*held[0], *held[1])
        return pages.seen(held[0], form), pages.seen(held[1], form)
