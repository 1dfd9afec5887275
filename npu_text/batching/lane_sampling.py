"""What requests may ask for of the choice of their tokens."""

from __future__ import annotations

from math import isfinite

from npu_compiler.errors import InputError
from npu_compiler.graph.lane_tokens import MOST_BEST
from npu_text.batching.engine import LaneSampling
from npu_text.sampling import LARGEST, SMALLEST

__all__ = ["check_sampling"]


def check_sampling(sampling: LaneSampling, vocabulary: int) -> None:
    """Refuses what no choice can be made by.

    Args:
        sampling: How to choose.
        vocabulary: How many tokens there are.

    Raises:
        InputError: A number out of its range, or a bias for a token that there is not.
    """
    ranges: list[tuple[str, bool, str]] = [
        ("temperature", 0 <= sampling.temperature < float("inf"), "0 (greedy) or more"),
        ("top_k", sampling.top_k >= 0, "0 (all tokens) or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("min_p", 0 <= sampling.min_p <= 1, "0 to 1"),
        ("repetition_penalty", SMALLEST <= sampling.repetition_penalty <= LARGEST, "above 0, and finite"),
        ("presence_penalty", abs(sampling.presence_penalty) <= LARGEST, "a finite number"),
        ("frequency_penalty", abs(sampling.frequency_penalty) <= LARGEST, "a finite number"),
        ("best", sampling.best is None or 0 <= sampling.best <= MOST_BEST, f"None, or 0 to {MOST_BEST}"),
    ]
    for name, is_right, expected in ranges:
        if not is_right:
            raise InputError(f"given {name}={getattr(sampling, name)}, expected {expected}")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocabulary:
            raise InputError(f"given a logit_bias for token {token}, expected 0 to {vocabulary - 1}")
        if not (isfinite(bias) and abs(bias) <= LARGEST):
            raise InputError(f"given logit_bias={bias} for token {token}, expected a finite number")
