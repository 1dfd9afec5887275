"""How to choose the next token from logits: greedy, or at random by temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass
from secrets import randbits
from typing import Any

import numpy as np
from numpy.typing import NDArray

from npu_compiler.errors import DeviceError, InputError

__all__ = ["LARGEST", "SMALLEST", "Sampling", "draw_inputs", "inverse_temperature", "not_a_number", "signed_seed"]

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
"""What devices compute with, beside 0."""

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


def draw_inputs(sampling: Sampling) -> dict[str, NDArray[Any]]:
    """What the op `npu_tokens.draw` takes for one text, and `random_words` for its seed.

    Args:
        sampling: At a temperature above 0.

    Returns:
        ``limits`` float32 [1, 3]: the inverse temperature, top-p, and no least probability. ``top_k`` int64 [1], 0 for
        all. ``seeds`` int64 [1].
    """
    limits = inverse_temperature(sampling.temperature), 1.0 if sampling.top_p is None else sampling.top_p, 0.0
    return {
        "limits": np.array([limits], np.float32),
        "top_k": np.array([min(sampling.top_k or 0, np.iinfo(np.int64).max)]),
        "seeds": np.array([signed_seed(randbits(_SEED_BITS) if sampling.seed is None else sampling.seed)]),
    }


def inverse_temperature(temperature: float) -> float:
    """1 / temperature, as a float32 above 0; 0 for the greedy choice."""
    return min(max(1 / temperature, SMALLEST), LARGEST) if temperature else 0.0


def signed_seed(seed: int) -> int:
    """The 64 bits of a seed that count, as an int64."""
    half = 1 << (_SEED_BITS - 1)
    return (seed + half) % (2 * half) - half


def not_a_number() -> DeviceError:
    """What to raise for logits of which the highest is none that can be compared."""
    return DeviceError(
        "the model gave no number as highest logit; its weights are damaged, or too large for the data type: extract "
        "it as bfloat16"
    )
