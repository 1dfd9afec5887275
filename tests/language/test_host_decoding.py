"""Steps that are asked for one by one, whose tokens the host hands on: as looking at all logits has them."""

from __future__ import annotations

from typing import Any

import pytest

from npu_compiler.errors import InputError
from npu_runtime import Generator
from npu_text.host_decoding import decode_on_host
from npu_text.sampling import Sampler, Sampling

PROMPT = [5, 6, 7, 8, 9]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 300},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 200, "top_p": 0.8},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_replayed_steps_choose_as_all_logits_do(generator: Generator, options: dict[str, Any]) -> None:
    """Also at random, as the numbers of a seed are those of a position; but for roundings."""
    seeded = options and options | {"seed": 3}
    sequence, sampler = generator.model.begin(), Sampler(Sampling(**seeded))
    expected = [sampler.choose_from(sequence.advance(PROMPT), len(PROMPT))]
    for _ in range(19):
        logits = sequence.advance(expected[-1:])
        expected.append(sampler.choose_from(logits, len(sequence.tokens)))
    assert generator.model.updates_in_place
    assert [token.id for token in generator.generate(PROMPT, 20, **seeded)] == expected


def test_a_sequence_goes_on_in_between(generator: Generator) -> None:
    model, greedy = generator.model, Sampler(Sampling())
    sequence, again = model.begin(), model.begin()
    tokens = decode_on_host(sequence, greedy, 20)(sequence.advance(PROMPT))
    text = [next(tokens) for _ in range(3)]
    sequence.advance([11, 12, 13])
    text.append(next(tokens))
    logits = again.advance([*PROMPT, *text[:2], 11, 12, 13, text[2]])
    assert sequence.tokens == again.tokens
    assert greedy.choose_from(logits, len(again.tokens)) == text[-1]


def test_a_full_cache_is_told(generator: Generator) -> None:
    sequence = generator.model.begin()
    tokens = decode_on_host(sequence, Sampler(Sampling()), 20)(sequence.advance(PROMPT))
    with pytest.raises(InputError, match=f"given 1 tokens after {generator.model.spec.cache_length}, expected"):
        list(tokens)
    assert len(sequence.tokens) == generator.model.spec.cache_length
