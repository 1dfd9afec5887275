"""Choosing the next token from logits: greedy, or at random by temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import DeviceError, InputError
from npu_compiler.graph.sampled_token import PIVOTS
from npu_runtime.buffer import NPUBuffer
from npu_text.token_rows import TokenRows, place

__all__ = ["Drawing", "Sampler", "Sampling", "not_a_number"]

_TRIES = (4, 16, 64)
_RARELY = 1e-4  # how often all tries may fail, if the most tries allow that
_FIRST_LOOK = 256  # tokens that are sorted for top-p
_NEXT_LOOK = 16  # so many times as many where those do not suffice


class Drawing(NamedTuple):
    """How `sampled_token_ir` is to choose.

    Attributes:
        tries: How many tokens are drawn.
        limits: What they are held against, by the names of the inputs.
    """

    tries: int
    limits: Mapping[str, float]


@dataclass(frozen=True)
class Sampling:
    """How to choose.

    Attributes:
        temperature: Divides the logits; 0 always takes the highest, the first of equals.
        top_k: Choose among that many of the highest.
        top_p: Choose among the fewest of the highest whose probabilities together reach this (nucleus sampling:
            Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020); applied after `top_k`.
        seed: Equal seeds give equal choices from equal logits, and mostly from such as differ by roundings; None takes
            one from the system.

    Raises:
        InputError: A number out of its range, or a choice among several at temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"given temperature={self.temperature}, expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"given top_k={self.top_k}, expected at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"given top_p={self.top_p}, expected above 0 and at most 1")
        if self.seed is not None and self.seed < 0:
            raise InputError(f"given seed={self.seed}, expected 0 or more")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None or self.seed is not None):
            raise InputError(
                "given top_k, top_p or a seed at temperature 0, which always takes the highest logit; set a "
                "temperature above 0, such as 0.8"
            )

    @property
    def drawing(self) -> Drawing | None:
        """How to choose by drawing from all tokens; None for the greedy choice, and for `top_p` of very many tokens."""
        top_p = None if self.top_p == 1 else self.top_p
        if self.temperature == 0 or (top_p is not None and self.top_k is not None and self.top_k > PIVOTS):
            return None
        limits = {name: limit for name, limit in (("top_k", self.top_k), ("top_p", top_p)) if limit is not None}
        if self.top_k is not None:  # how probable so many are is not known
            return Drawing(_TRIES[1], limits)
        if top_p is None:
            return Drawing(1, limits)
        return Drawing(next((n for n in _TRIES if (1 - top_p) ** n <= _RARELY), _TRIES[-1]), limits)


class Sampler:
    """Chooses the tokens of one text, on the host.

    Attributes:
        sampling: How.
        inverse_temperature: 1 / temperature, as a float32 above 0; 0 for the greedy choice.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling, self._drawing = sampling, sampling.drawing
        self.inverse_temperature = _inverse(sampling.temperature)
        self._random = np.random.default_rng(sampling.seed)

    def draws(self) -> NDArray[np.float32]:
        """Random numbers [tries + 1, 2] for one choice: for each try a row and a column, and a last pair for `choose`.

        They are all that a choice takes from the random numbers of the seed, however it comes about.
        """
        drawing = self._drawing
        return self._random.random((1 + (drawing.tries if drawing else 0), 2), np.float32)

    def choose_from(self, logits: NPUBuffer | NDArray[Any], draws: NDArray[np.float32] | None = None) -> int:
        """As `choose`, from logits of any shape with one row, wherever they lie."""
        return self.choose((logits.to_numpy() if isinstance(logits, NPUBuffer) else logits).reshape(-1), draws)

    def choose(self, logits: NDArray[Any], draws: NDArray[np.float32] | None = None) -> int:
        """The next token.

        Args:
            logits: Floating point, shape [V].
            draws: What `draws` gave for this choice; the next ones when omitted.

        Raises:
            DeviceError: The logits are not numbers.
        """
        return self.choose_by_rows(TokenRows.of(logits, self.inverse_temperature), draws)

    def choose_by_rows(self, rows: TokenRows, draws: NDArray[np.float32] | None = None) -> int:
        """As `choose`, where more than the logits is known."""
        if not isfinite(rows.best_logit):
            raise not_a_number(str(rows.best_logit))
        if self.sampling.temperature == 0:
            return rows.best()
        draws = self.draws() if draws is None else draws
        candidates = self._few_candidates(rows)
        token = self._drawn(rows, draws, candidates)
        if token is None:
            tokens, weights = candidates or self._candidates(rows)
            token = int(tokens[place(weights.cumsum(dtype=np.float64), _joined(draws[-1]))])
        return token

    def _few_candidates(self, rows: TokenRows) -> tuple[NDArray[np.intp], NDArray[np.float32]] | None:
        """`_candidates`, where they are found in a few rows; so it is wherever both limits are drawn by."""
        top_k = self.sampling.top_k
        return self._candidates(rows) if top_k is not None and top_k <= max(PIVOTS, len(rows.highest)) else None

    def _drawn(self, rows: TokenRows, draws: NDArray[np.float32], candidates: tuple[Any, ...] | None) -> int | None:
        """What the function of `sampled_token_ir` chooses, but for roundings; None where it is undecided.

        Args:
            rows: The logits.
            draws: What `draws` gave.
            candidates: What `_few_candidates` gave.
        """
        drawing = self._drawing
        if drawing is None:
            return None
        pairs = draws[: drawing.tries].tolist()
        if not drawing.limits:
            return rows.drawn_in(rows.drawn_row(pairs[0][0]), pairs[0][1])
        drawn = ((rows.drawn_row(for_row), for_column) for for_row, for_column in pairs)
        if candidates is None:
            allows = _allowing(rows, drawing.limits)
        else:
            few, columns = frozenset(candidates[0].tolist()), int(rows.logits.shape[1])
            rows_of_few = {token // columns for token in few}
            drawn = (each for each in drawn if each[0] in rows_of_few)
            allows = few.__contains__
        return next((token for token in (rows.drawn_in(*each) for each in drawn) if allows(token)), None)

    def _candidates(self, rows: TokenRows) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
        """The tokens to choose among, in order, and how probable they are."""
        top_k, top_p = self.sampling.top_k, self.sampling.top_p
        count = rows.count if top_k is None else min(top_k, rows.count)
        if top_k is not None or top_p is None:
            tokens, logits = rows.likeliest(count)
            weights = rows.weights(logits)
            return (tokens, weights) if top_p is None else _nucleus(tokens, weights, top_p * float(weights.sum()))
        share, looked = top_p * rows.total(), min(_FIRST_LOOK, count)
        while True:  # few tokens mostly hold the probability that is asked for: only those are sorted
            tokens, logits = rows.likeliest(looked)
            weights = rows.weights(logits)
            if looked == count or weights.sum() >= share:
                return _nucleus(tokens, weights, share)
            looked = min(_NEXT_LOOK * looked, count)


def _nucleus(
    tokens: NDArray[np.intp], weights: NDArray[np.float32], share: float
) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """The first tokens that together weigh so much."""
    kept = int(weights.cumsum(dtype=np.float64).searchsorted(share)) + 1
    return tokens[:kept], weights[:kept]


def _inverse(temperature: float) -> float:
    """1 / temperature, as a float32 above 0; 0 for the greedy choice."""
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    return min(max(1 / temperature, least), most) if temperature else 0.0


def _allowing(rows: TokenRows, limits: Mapping[str, float]) -> Callable[[int], bool]:
    """Whether a limit, of which there is one, allows a token."""
    if "top_k" in limits:
        return lambda token: rows.number_before(token) < limits["top_k"]
    share = limits["top_p"] * rows.total()
    return lambda token: rows.mass_before(token) < share


def _joined(pair: NDArray[np.float32]) -> float:
    """One random number from two, of 24 bits each."""
    return float(pair[0]) + float(pair[1]) * 2.0**-24


def not_a_number(highest: str) -> DeviceError:
    """What to raise for logits of which the highest is none that can be compared."""
    return DeviceError(
        f"the model gave {highest} as highest logit; its weights are damaged, or too large for the data type: extract "
        "it as bfloat16"
    )
