"""Choosing the next token from logits: greedy, or at random by temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import DeviceError, InputError
from npu_compiler.graph.sampled_token import PIVOTS, as_matrix
from npu_runtime.buffer import NPUBuffer

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
    """Chooses the tokens of one text, on the host."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    def draws(self) -> NDArray[np.float32]:
        """Random numbers [tries + 1, 2] for one choice: for each try a row and a column, and a last pair for `choose`.

        They are all that a choice takes from the random numbers of the seed, however it comes about.
        """
        drawing = self.sampling.drawing
        return self._random.random((1 + (drawing.tries if drawing else 0), 2), np.float32)

    def choose_from(self, logits: NPUBuffer | NDArray[Any], draws: NDArray[np.float32] | None = None) -> int:
        """As `choose`, from logits of any shape with one row, wherever they lie."""
        array = logits.to_numpy() if isinstance(logits, NPUBuffer) else logits
        return self.choose(array.astype(np.float32).reshape(-1), draws)

    def choose(self, logits: NDArray[Any], draws: NDArray[np.float32] | None = None) -> int:
        """The next token.

        Args:
            logits: Floating point, shape [V].
            draws: What `draws` gave for this choice; the next ones when omitted.

        Raises:
            DeviceError: The logits are not numbers.
        """
        best = int(logits.argmax())  # numpy takes NaN for the highest
        if not np.isfinite(logits[best]):
            raise not_a_number(str(logits[best]))
        if self.sampling.temperature == 0:
            return best
        draws = self.draws() if draws is None else draws
        token = self._drawn(logits, draws)
        if token is None:
            tokens = self._candidates(logits)
            token = int(tokens[_place(self._weights(logits[tokens], logits[best]), _joined(draws[-1]))])
        return token

    def _drawn(self, logits: NDArray[Any], draws: NDArray[np.float32]) -> int | None:
        """What the function of `sampled_token_ir` chooses, but for roundings; None where it is undecided."""
        drawing = self.sampling.drawing
        if drawing is None:
            return None
        rows, columns = as_matrix(len(logits))
        padded = np.zeros(rows * columns)
        weights = padded[: len(logits)]
        weights[:] = self._weights(logits, logits.max())
        matrix = padded.reshape(rows, columns)
        sums = matrix.sum(axis=1)
        allows = _allowing(drawing.limits, logits, weights)
        for for_row, for_column in draws[: drawing.tries].tolist():
            row = _place(sums, for_row)
            token = columns * row + _place(matrix[row], for_column)
            if allows(token):
                return token
        return None

    def _candidates(self, logits: NDArray[Any]) -> NDArray[np.intp]:
        """The tokens to choose among."""
        top_k, top_p = min(self.sampling.top_k or len(logits), len(logits)), self.sampling.top_p
        if top_p is None:
            return _highest(logits, top_k)
        best = logits.max()
        total = self._weights(logits[_highest(logits, top_k)], best).sum()
        count = min(_FIRST_LOOK, top_k)
        while True:  # few tokens mostly hold the probability that is asked for: only those are sorted
            tokens = _by_probability(logits, count)
            reached = self._weights(logits[tokens], best).cumsum() / total
            if reached[-1] >= top_p or count == top_k:
                return tokens[: int(np.searchsorted(reached, top_p)) + 1]
            count = min(_NEXT_LOOK * count, top_k)

    def _weights(self, logits: NDArray[Any], best: Any) -> NDArray[np.float64]:
        """How probable tokens are, relative to the best."""
        return np.exp((logits.astype(np.float64) - np.float64(best)) / self.sampling.temperature)


def _place(weights: NDArray[np.float64], share: float) -> int:
    """The first place whose running sum is above a share of the whole; never one without weight."""
    reached = weights.cumsum()
    found = np.searchsorted(reached, share * reached[-1], "right")
    return int(min(found, np.searchsorted(reached, reached[-1])))  # rounding may reach the end


def _joined(pair: NDArray[np.float32]) -> float:
    """One random number from two, of 24 bits each."""
    return float(pair[0]) + float(pair[1]) * 2.0**-24


def _allowing(limits: Mapping[str, float], logits: NDArray[Any], weights: NDArray[np.float64]) -> Callable[[int], bool]:
    """Whether a token is among the likeliest, of equal ones the first before the others."""
    count = min(int(limits.get("top_k", len(logits))), len(logits))
    share = limits["top_p"] * weights[_highest(logits, count)].sum() if "top_p" in limits else np.inf

    def allows(token: int) -> bool:
        before = logits > logits[token]
        before[:token] |= logits[:token] == logits[token]
        return bool(before.sum() < count and weights[before].sum() < share)

    return allows if limits else lambda token: True


def _highest(logits: NDArray[Any], count: int) -> NDArray[np.intp]:
    """The tokens of that many of the highest logits, of equal ones the first; in any order where it is all of them."""
    return _by_probability(logits, count) if count < len(logits) else np.arange(len(logits))


def _by_probability(logits: NDArray[Any], count: int) -> NDArray[np.intp]:
    """The tokens of that many of the highest logits, the highest and of equal ones the first before the others."""
    lowest = np.partition(logits, len(logits) - count)[len(logits) - count]
    tokens = np.flatnonzero(logits >= lowest)
    return tokens[np.argsort(-logits[tokens], kind="stable")[:count]]


def not_a_number(highest: str) -> DeviceError:
    """What to raise for logits of which the highest is none that can be compared."""
    return DeviceError(
        f"the model gave {highest} as highest logit; its weights are damaged, or too large for the data type: extract "
        "it as bfloat16"
    )
