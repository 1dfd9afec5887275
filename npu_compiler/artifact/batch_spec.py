"""What a folder says of functions for many texts at once, whose keys and values lie in pages of pools."""

from __future__ import annotations

from dataclasses import dataclass

from npu_compiler.dtypes import ALL

__all__ = ["BatchSpec", "BatchStepSpec"]


@dataclass(frozen=True)
class BatchStepSpec:
    """A function that takes some tokens of each of some lanes, and updates the pools.

    Attributes:
        ir: Name of its IR file.
        lanes: How many lanes it takes: B.
        length: How many tokens of each: N.
        tokens: The input with the tokens: int64 [B, N].
        positions: The input with their positions in their texts: int64 [B, N]; -1 for what is nobody's.
        tables: The input with the pages of each lane, in order: int32 [B, context / page_tokens].
        last: The input that says which token's logits to give: int64 [1]; empty where those of all are given, or none.
        logits: The output with the logits: [B, 1, vocabulary], or [B, N, vocabulary] without `last`; empty for none.
        pools: For each pool its input, and the output that is its new state.
    """

    ir: str
    lanes: int
    length: int
    tokens: str
    positions: str
    tables: str
    last: str
    logits: str
    pools: tuple[tuple[str, str], ...]

    @property
    def fills(self) -> bool:
        """Whether it is for parts of prompts, and not for steps. An earlier release had the logits of one token."""
        return bool(self.last) or not self.logits


@dataclass(frozen=True)
class BatchSpec:
    """Functions for many texts at once: decode steps of several numbers of lanes, and chunks of lanes' prompts.

    Decode steps take one token of each lane; others take several, the last one chosen and a guess of those that follow.

    Attributes:
        page_tokens: Tokens of a page.
        pages: Pages that there are to give out; behind them the pools have one for what is nobody's.
        context: Tokens of a text, at most: whole pages.
        pool_shapes: Shape of each pool: [pages + 1, heads, page_tokens, head size]; of the scales of one in codes the
            head size is 1.
        functions: The functions by name; some of them take a single token of each lane.
        pool_dtypes: Data type of each pool; the model's for all where there are none.
    """

    page_tokens: int
    pages: int
    context: int
    pool_shapes: tuple[tuple[int, ...], ...]
    functions: dict[str, BatchStepSpec]
    pool_dtypes: tuple[str, ...] = ()

    def pools(self, dtype: str) -> list[tuple[tuple[int, ...], str]]:
        """Shape and data type of each pool of a model that computes in `dtype`."""
        return [*zip(self.pool_shapes, self.pool_dtypes or (dtype,) * len(self.pool_shapes), strict=True)]

    @property
    def decode(self) -> dict[int, str]:
        """The names of the functions that take one token of each lane, by how many lanes these are, ascending."""
        return self._by_lanes(1)

    @property
    def guess(self) -> int:
        """The most tokens of a lane that a function gives all logits of; 1 where none takes guesses."""
        return max((step.length for step in self.functions.values() if not step.fills), default=1)

    @property
    def check(self) -> dict[int, str]:
        """The names of the functions that take `guess` tokens of each lane, by how many lanes these are, ascending."""
        return self._by_lanes(self.guess)

    def _by_lanes(self, length: int) -> dict[int, str]:
        """Functions that give the logits of all their tokens."""
        ascending = sorted(self.functions.items(), key=lambda item: item[1].lanes)
        return {step.lanes: name for name, step in ascending if step.length == length and not step.fills}

    @property
    def chunks(self) -> dict[int, dict[int, str]]:
        """The names of the functions for parts of prompts, by how many tokens of each lane they take, and then by how
        many lanes, ascending."""
        chunks: dict[int, dict[int, str]] = {}
        for name, step in sorted(self.functions.items(), key=lambda item: (item[1].length, item[1].lanes)):
            if step.fills:
                chunks.setdefault(step.length, {})[step.lanes] = name
        return chunks

    def contradiction(self) -> str:
        """What contradicts itself; empty where nothing does."""
        if self.page_tokens < 1 or self.pages < 1 or self.context < 1 or self.context % self.page_tokens:
            return f"{self.pages} pages of {self.page_tokens} tokens for texts of {self.context}, expected whole pages"
        if any(shape[:1] != (self.pages + 1,) or shape[2:3] != (self.page_tokens,) for shape in self.pool_shapes):
            return f"pools that do not have {self.pages} + 1 pages of {self.page_tokens} tokens"
        if len(self.pool_dtypes) not in (0, len(self.pool_shapes)) or not {*self.pool_dtypes} <= {k.name for k in ALL}:
            return f"{len(self.pool_shapes)} pools of the data types {list(self.pool_dtypes)}, expected one for each"
        if not self.decode or any(lanes < 1 for lanes in self.decode):
            return "no function that takes one token of each lane"
        for name, step in self.functions.items():
            fits = len(step.pools) == len(self.pool_shapes) and not (step.fills and step.length == 1)
            fits = fits and step.lanes >= 1 and not (step.last and (step.lanes != 1 or not step.logits))
            if not fits or not 1 <= step.length <= self.context:
                return f"a function '{name}' that does not fit the pools, or its length"
        wrong = next((length for length, names in self.chunks.items() if 1 not in names), 0)
        if wrong or not self.chunks:
            return f"no function that takes {wrong or 'several'} tokens of one lane's prompt"
        return ""
