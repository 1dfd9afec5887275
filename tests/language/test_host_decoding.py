"""Tokens that the host chooses behind a replayed step, and rows of logits: as looking at all logits has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from npu_compiler.compiler import compile
from npu_compiler.errors import InputError
from npu_compiler.graph.token_matrix import as_matrix
from npu_compiler.graph.token_rows import token_rows_ir
from npu_runtime import Device, Executor, Generator, NPUBuffer
from npu_text.host_decoding import decode_on_host
from npu_text.sampling import Sampler, Sampling
from npu_text.token_rows import TokenRows
from tests.support.host_kernels import HAS_COMPILER, run_plan_on_host

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
LOGITS = st.lists(
    st.floats(-50, 50, width=16) | st.sampled_from([-1.0, 0.0, 2.0, float("-inf")]), min_size=1, max_size=90
).filter(lambda logits: max(logits) > -100)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_replayed_steps_choose_as_all_logits_do(generator: Generator, options: dict[str, Any]) -> None:
    """Which has drawn texts be the same but for roundings of sums."""
    seeded = options and options | {"seed": 3}
    sequence, sampler = generator.model.begin(), Sampler(Sampling(**seeded))
    expected = [sampler.choose_from(sequence.advance(PROMPT))]
    for _ in range(19):
        expected.append(sampler.choose_from(sequence.advance(expected[-1:])))
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
    assert greedy.choose_from(logits) == text[-1]


def test_a_full_cache_is_told(generator: Generator) -> None:
    sequence = generator.model.begin()
    tokens = decode_on_host(sequence, Sampler(Sampling()), 20)(sequence.advance(PROMPT))
    with pytest.raises(InputError, match=f"given 1 tokens after {generator.model.spec.cache_length}, expected"):
        list(tokens)
    assert len(sequence.tokens) == generator.model.spec.cache_length


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 90, 997])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_rows_of_the_device(vocabulary: int, kind: str, device: Device, rng: np.random.Generator) -> None:
    logits = (3 * rng.standard_normal((1, 1, vocabulary))).astype(ml_dtypes.bfloat16).astype(np.float32)
    executor = Executor(compile(token_rows_ir(vocabulary, kind, True), device.target, kind), device)
    outputs = executor.run({"logits": logits, "inverse_temperature": np.array([1.25], np.float32)})
    expected, (rows, _) = TokenRows.of(logits.reshape(-1), 1.25), as_matrix(vocabulary)
    assert np.array_equal(outputs["all_logits"].to_numpy().astype(np.float32), logits.reshape(-1))
    assert np.array_equal(outputs["highest"].to_numpy().reshape(rows), expected.highest)
    np.testing.assert_allclose(outputs["sums"].to_numpy().reshape(rows), expected.sums, rtol=2e-6)


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler to run kernels on the processor with")
@pytest.mark.parametrize("weighed", [False, True])
def test_rows_by_kernels_for_cuda(weighed: bool, rng: np.random.Generator, tmp_path: Path) -> None:
    logits = (3 * rng.standard_normal(997)).astype(ml_dtypes.bfloat16)
    plan = compile(token_rows_ir(997, "bfloat16", weighed), "cuda", "bfloat16").main.resolved(lambda *_: 0)
    arrays = {"logits": logits} | ({"inverse_temperature": np.array([1.25], np.float32)} if weighed else {})
    found = run_plan_on_host(plan, {name: array.view(np.uint8) for name, array in arrays.items()}, tmp_path)
    expected = TokenRows.of(logits, 1.25)
    assert np.array_equal(found["all_logits"].view(ml_dtypes.bfloat16), logits)
    assert np.array_equal(found["highest"].view(np.float32), expected.highest)
    assert ("sums" in found) == weighed
    if weighed:
        np.testing.assert_allclose(found["sums"].view(np.float32), expected.sums, rtol=2e-6)


def test_a_row_without_a_number_is_told(device: Device) -> None:
    logits = np.zeros((1, 1, 90), np.float32)
    logits[0, 0, 37] = np.nan
    executor = Executor(compile(token_rows_ir(90, "bfloat16", False), device.target, "bfloat16"), device)
    outputs = executor.run({"logits": logits})
    highest = outputs["highest"]
    assert isinstance(highest, NPUBuffer)
    assert np.flatnonzero(np.isnan(highest.to_numpy())).tolist() == [37 // as_matrix(90)[1]]


def in_order(logits: NDArray[np.float32]) -> NDArray[np.intp]:
    return np.argsort(-logits, kind="stable")


@given(LOGITS, st.integers(0, 89), st.floats(0.01, 10))
def test_what_comes_before_a_token(given_logits: list[float], token: int, inverse: float) -> None:
    logits = np.array(given_logits, np.float32)
    token %= len(logits)
    rows, order = TokenRows.of(logits, inverse), in_order(logits)
    rank = order.tolist().index(token)
    assert rows.number_before(token) == rank
    weights = np.exp((logits.astype(np.float64) - logits.max()) * inverse)
    np.testing.assert_allclose(rows.mass_before(token), weights[order[:rank]].sum(), rtol=1e-4, atol=1e-30)
    np.testing.assert_allclose(rows.total(), weights.sum(), rtol=1e-4)


@given(LOGITS, st.integers(1, 90))
def test_the_likeliest_are_in_order(given_logits: list[float], count: int) -> None:
    logits = np.array(given_logits, np.float32)
    count = min(count, len(logits))
    tokens, found = TokenRows.of(logits, 1.0).likeliest(count)
    assert tokens.tolist() == in_order(logits)[:count].tolist()
    assert np.array_equal(found, logits[tokens])
    assert TokenRows.of(logits, 0.0).best() == tokens[0]
