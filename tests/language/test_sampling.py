"""Choosing tokens: greedy, temperature, top-k, top-p, seeds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_compiler.errors import DeviceError, InputError
from npu_runtime import Generator
from npu_text.batching.engine import LaneSampling
from npu_text.sampling import Sampler, Sampling
from tests.support.lane_choice import wanted

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))


def draws(count: int = 4000, **options: Any) -> np.ndarray[Any, Any]:
    """How often each token is chosen, as a share."""
    sampler = Sampler(Sampling(**{"temperature": 1.0, "seed": 0} | options))
    return np.bincount([sampler.choose(LOGITS, place) for place in range(count)], minlength=len(LOGITS)) / count


def test_greedy_takes_the_first_of_the_highest() -> None:
    assert Sampler(Sampling()).choose(np.array([0.0, 2.0, 1.0, 2.0], np.float32), 0) == 1


def test_temperature_one_draws_by_probability() -> None:
    np.testing.assert_allclose(draws(), np.exp(LOGITS), atol=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    for temperature in (0.5, 2.0):
        expected = np.exp(LOGITS / temperature)
        np.testing.assert_allclose(draws(temperature=temperature), expected / expected.sum(), atol=0.03)


def test_a_tiny_temperature_is_greedy() -> None:
    assert draws(count=50, temperature=1e-30)[1] == 1


def test_top_k() -> None:
    np.testing.assert_allclose(draws(top_k=2), np.array([0, 0.4, 0, 0.25, 0]) / 0.65, atol=0.03)


def test_top_p() -> None:
    np.testing.assert_allclose(draws(top_p=0.6), np.array([0, 0.4, 0, 0.25, 0]) / 0.65, atol=0.03)
    assert draws(top_p=0.3)[1] == 1, "the likeliest token always stays"
    np.testing.assert_allclose(draws(top_p=1.0), np.exp(LOGITS), atol=0.03)


def test_top_p_counts_within_top_k() -> None:
    np.testing.assert_allclose(draws(top_k=3, top_p=0.7), np.array([0, 0.4, 0, 0.25, 0]) / 0.65, atol=0.03)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50),
    st.floats(0.01, 10),
    st.none() | st.integers(1, 60),
    st.none() | st.floats(0.001, 1),
)
def test_a_choice_is_among_the_likeliest(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    array = np.array(logits, np.float32)
    chosen = Sampler(Sampling(temperature, top_k, top_p, seed=1)).choose(array, 5)
    assert (array > array[chosen]).sum() < (top_k or len(array))


@given(
    st.lists(st.floats(-50, 50, width=16) | st.sampled_from([-1.0, 0.0, -0.0, 2.0]), min_size=1, max_size=90),
    st.sampled_from([0.0, 1e-6, 0.1, 0.7, 1.0, 3.0, 1e6]),
    st.none() | st.sampled_from([1, 2, 7, 40, 1 << 40, 1 << 70]),
    st.none() | st.sampled_from([1.0, 1e-9, 0.3, 0.9, 0.999999]),
    st.integers(0, 1 << 70),
    st.integers(0, 1 << 40),
)
def test_choices_are_those_of_the_reference(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None, seed: int, position: int
) -> None:
    """Which has weights in float64: where one of them rounds otherwise, a number near to another token decides."""
    array = np.array(logits, np.float32)
    sampling = Sampling(temperature, top_k, top_p, seed) if temperature else Sampling()
    expected = wanted(array, LaneSampling(temperature, top_k or 0, top_p or 1.0, seed=seed), position)
    token = Sampler(sampling).choose(array, position)
    assert expected.is_met_by(token)


@pytest.mark.parametrize("spread", [0.0, 0.3, 4.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.9), (None, 1.0), (40, None), (40, 0.5), (5000, 0.99)])
def test_choices_from_a_large_vocabulary(
    spread: float, top_k: int | None, top_p: float | None, rng: np.random.Generator
) -> None:
    """As sorting everything gives them; rounded, many logits are equal."""
    logits = (rng.standard_normal(20_000) * spread).astype(np.float16).astype(np.float32)
    for position in range(20):
        expected = wanted(logits, LaneSampling(0.8, top_k or 0, top_p or 1.0, seed=3), position)
        token = Sampler(Sampling(0.8, top_k, top_p, 3)).choose(logits, position)
        assert expected.is_met_by(token)


def test_closed_tokens_are_never_chosen() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf], np.float32)
    assert Sampler(Sampling(5.0, seed=3)).choose(logits, 5) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 0.8, 100.0])
@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_k": 10**15}, {"top_p": 5e-324}, {"top_k": 3, "top_p": 0.9}])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_tokens_closed_by_the_lowest_number(temperature: float, limits: dict[str, Any], dtype: Any) -> None:
    """No weight, and no warning, though a difference times the inverse temperature is no float32."""
    lowest = ml_dtypes.finfo(dtype).min  # type: ignore[no-untyped-call]
    logits = np.array([lowest, 9.0, lowest, 9.0, lowest], dtype)
    sampler = Sampler(Sampling(temperature, **limits, seed=3))
    assert {sampler.choose(logits, place) for place in range(20)} <= {1, 3}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9), Sampling(0.8, top_k=1)], ids=str)
@pytest.mark.parametrize("logits", [[0, np.nan], [0, np.inf], [-np.inf, -np.inf]], ids=str)
def test_logits_that_are_no_numbers(logits: list[float], sampling: Sampling) -> None:
    with pytest.raises(DeviceError, match="as highest logit"):
        Sampler(sampling).choose(np.array(logits, np.float32), 5)


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
