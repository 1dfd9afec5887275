"""Choosing the next token from logits: greedy, or at random by temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from secrets import randbits
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import DeviceError, InputError
from npu_compiler.ops.drawing import words_of
from npu_runtime.buffer import NPUBuffer

__all__ = ["LARGEST", "SMALLEST", "Sampler", "Sampling", "inverse_temperature", "not_a_number", "signed_seed"]

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""What devices compute with, beside 0."""

_ONE = 2.0**40  # the weight of the likeliest token
_WORD, _WORD_BITS = (1 << 32) - 1, 32
_SEED_BITS = 64


@dataclass(frozen=True)
class Sampling:
    """How to choose.

    Attributes:
        temperature: Divides the logits; 0 always takes the highest, the first of equals.
        top_k: Choose among that many of the highest.
        top_p: Choose among the fewest of the highest whose probabilities together reach this (nucleus sampling:
            Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020); applied after `top_k`.
        seed: Of the random numbers, 64 bits of which count; equal seeds give equal choices from equal logits, and
            mostly from such as differ by roundings. None takes one from the system.

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


class Sampler:
    """Chooses the tokens of one text as `npu_tokens.draw` does, on the host.

    Attributes:
        sampling: How.
        limits: As that op takes them, float32 [1, 3]: the inverse temperature, top-p, and no least probability.
        top_k: int64 [1]; 0 for all.
        seeds: int64 [1], of the random words.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        inverse = inverse_temperature(sampling.temperature)
        self.limits = np.array([[inverse, 1.0 if sampling.top_p is None else sampling.top_p, 0.0]], np.float32)
        self.top_k = np.array([min(sampling.top_k or 0, np.iinfo(np.int64).max)])
        self.seeds = np.array([signed_seed(randbits(_SEED_BITS) if sampling.seed is None else sampling.seed)])

    def choose_from(self, logits: NPUBuffer | NDArray[Any], position: int) -> int:
        """As `choose`, from logits of any shape with one row, wherever they lie."""
        return self.choose((logits.to_numpy() if isinstance(logits, NPUBuffer) else logits).reshape(-1), position)

    def choose(self, logits: NDArray[Any], position: int) -> int:
        """The next token.

        Args:
            logits: Floating point, shape [V].
            position: Of the token in its text.

        Raises:
            DeviceError: The logits are not numbers.
        """
        wide = logits.astype(np.float32)
        best = wide.max()
        if not isfinite(best):
            raise not_a_number(str(best))
        if self.sampling.temperature == 0:
            return int(wide.argmax())
        with np.errstate(over="ignore"):  # models close tokens by the lowest number that there is
            shares = np.exp((wide - best) * self.limits[0, 0])
        weights = (shares * np.float64(_ONE)).astype(np.int64)  # whole numbers: sums depend on no order
        weights[self._left_out(wide, weights)] = 0
        ends = weights.cumsum()
        high, low = words_of(int(self.seeds[0]), position)
        drawn = int(ends[-1]) * (high << _WORD_BITS | low) >> 2 * _WORD_BITS
        return int(np.searchsorted(ends, drawn, "right"))

    def _left_out(self, logits: NDArray[np.float32], weights: NDArray[np.int64]) -> NDArray[np.intp]:
        """The tokens that top-k and top-p leave out, of those that have a weight."""
        top_k, top_p = int(self.top_k[0]), float(self.limits[0, 1])
        some = np.flatnonzero(weights)
        if top_p == 1 and (not top_k or top_k >= len(some)):
            return some[:0]
        bits = (logits[some] + np.float32(0)).view(np.uint32)  # there is one zero
        keys = np.where(bits >> 31, bits, ~(bits | np.uint32(1 << 31))).astype(np.uint64)
        entries = np.sort(keys << np.uint64(_WORD_BITS) | some.astype(np.uint64))
        order = (entries & np.uint64(_WORD)).astype(np.intp)  # the likeliest first, of equal ones the first
        kept = min(top_k or len(order), len(order))
        if top_p < 1:
            ends = weights[order[:kept]].cumsum()
            least = max(int(ends[-1]) * int(top_p * (_WORD + 1)) >> _WORD_BITS, 1)
            kept = int(np.searchsorted(ends, least)) + 1
        return order[kept:]


def inverse_temperature(temperature: float) -> float:
    """1 / temperature, as a float32 above 0; 0 for the greedy choice."""
    return min(max(1 / temperature, SMALLEST), LARGEST) if temperature else 0.0


def signed_seed(seed: int) -> int:
    """The 64 bits of a seed that count, as an int64."""
    half = 1 << (_SEED_BITS - 1)
    return (seed + half) % (2 * half) - half


def not_a_number(highest: str) -> DeviceError:
    """What to raise for logits of which the highest is none that can be compared."""
    return DeviceError(
        f"the model gave {highest} as highest logit; its weights are damaged, or too large for the data type: extract "
        "it as bfloat16"
    )
