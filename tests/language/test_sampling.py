"""How tokens are to be chosen: numbers out of their range, and seeds."""

from __future__ import annotations

from typing import Any

import pytest

from npu_compiler.errors import InputError
from npu_runtime import Generator
from npu_text.sampling import Sampling


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, r"given temperature=-1.0, expected 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "given temperature=nan"),
        ({"temperature": 1.0, "top_k": 0}, "given top_k=0, expected at least 1"),
        ({"temperature": 1.0, "top_p": 1.5}, "given top_p=1.5, expected above 0 and at most 1"),
        ({"temperature": 1.0, "seed": -3}, "given seed=-3"),
        ({"top_k": 5}, "at temperature 0, which always takes the highest logit"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sampling(**options)


def test_a_seed_repeats_a_text(generator: Generator) -> None:
    def text(seed: int | None) -> list[int]:
        return [token.id for token in generator.generate([1, 2, 3], 24, temperature=1.0, top_p=0.95, seed=seed)]

    assert text(7) == text(7)
    assert text(7) != text(8)
    assert text(None) != text(None)
