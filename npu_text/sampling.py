"""Choosing the next token from logits: greedy, or at random by temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isqrt, nextafter
from secrets import randbits
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import DeviceError, InputError
from npu_compiler.integers import ceil_div
from npu_compiler.ops.drawing import words_of
from npu_runtime.buffer import NPUBuffer

__all__ = ["LARGEST", "SMALLEST", "Sampler", "Sampling", "inverse_temperature", "not_a_number", "signed_seed"]

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""What devices compute with, beside 0."""

_SEED_BITS = 64
_LOOKS = 256, 4096  # tokens that are sorted for top-p; all, where those do not suffice


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
    """Chooses the tokens of one text as `npu_tokens.draw` does, but for roundings, on the host.

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
            weights = np.exp((wide - best) * self.limits[0, 0])
        self._leave_out(wide, weights)
        high, low = words_of(int(self.seeds[0]), position)
        sums = _RunningSums(weights)
        return sums.passed(sums.whole * (high * 2.0**-32 + low * 2.0**-64))

    def _leave_out(self, logits: NDArray[np.float32], weights: NDArray[np.float32]) -> None:
        """Takes their weight from the tokens that top-k and top-p leave out."""
        count, top_p = min(int(self.top_k[0]) or len(logits), len(logits)), float(self.limits[0, 1])
        if top_p == 1 and count == len(logits):
            return
        if top_p == 1:
            highest = _highest(logits, count)
        else:
            least = top_p * float(weights.sum(dtype=np.float64)) if count == len(logits) else 0.0
            looks = [some for some in _LOOKS if some < count] if least else []
            for looked in (*looks, count):
                highest = _highest(logits, looked)
                sums = self._sums_of(highest)
                if sums.whole > least:  # so few tokens mostly hold what is asked for
                    break
            count = sums.passed(nextafter(least or top_p * sums.whole, 0.0)) + 1
        lowest = highest[count - 1]
        weights *= logits >= lowest
        above = np.count_nonzero(highest > lowest)
        weights[np.flatnonzero(logits == lowest)[count - above :]] = 0  # of equal ones the first stay

    def _sums_of(self, highest: NDArray[np.float32]) -> _RunningSums:
        """Of the weights of logits in order, the highest first."""
        with np.errstate(over="ignore"):
            return _RunningSums(np.exp((highest - highest[0]) * self.limits[0, 0]))


class _RunningSums:
    """The sums of weights [N], float32, up to each of them; only those of a part of them are ever made.

    Attributes:
        whole: Of all.
    """

    def __init__(self, weights: NDArray[np.float32]) -> None:
        columns = isqrt(len(weights) - 1) + 1
        rows = ceil_div(len(weights), columns)
        self._weights = np.zeros((rows, columns), np.float32)
        self._weights.reshape(-1)[: len(weights)] = weights
        self._ends = self._weights.sum(axis=1, dtype=np.float64).cumsum()
        self.whole = float(self._ends[-1])

    def passed(self, target: float) -> int:
        """The first place whose sum is above a number, or above all numbers below the whole; never one of no weight."""
        row = int(self._ends.searchsorted(min(target, nextafter(self.whole, 0.0)), "right"))
        ends = self._weights[row].cumsum(dtype=np.float64)
        left = target - (float(self._ends[row - 1]) if row else 0.0)
        return row * len(ends) + int(ends.searchsorted(min(left, nextafter(float(ends[-1]), 0.0)), "right"))


def _highest(logits: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """So many of the highest logits, the highest first."""
    behind = len(logits) - count
    some = np.partition(logits, behind)[behind:] if behind else logits
    return np.sort(some)[::-1]


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
