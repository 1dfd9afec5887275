"""Tokens drawn by probability: the reference's, and as probable as they are to be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import npu_compiler
from npu_compiler.errors import UnsupportedOpError
from npu_compiler.graph.ir_builder import IRBuilder
from npu_runtime import Device, Executor
from npu_text.batching.engine import LaneSampling
from tests.support.lane_choice import (
    HOSTILE_LIMITS,
    HOSTILE_TOP_K,
    check_hostile,
    limits_of,
    philox,
    probabilities,
    random_words,
    wanted,
)

FILTERS = [
    LaneSampling(1.0),
    LaneSampling(0.3),
    LaneSampling(1.0, top_k=5),
    LaneSampling(1.0, top_p=0.8),
    LaneSampling(2.0, top_p=0.05),
    LaneSampling(1.5, min_p=0.1),
    LaneSampling(1.5, top_k=12, top_p=0.8),
    LaneSampling(2.0, top_k=30, top_p=0.9, min_p=0.2),
]
MORE_THAN_A_LIST = 5000


def draw_ir(rows: int, vocabulary: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Words and tokens of rows of logits."""
    graph = IRBuilder()
    usual = {"logits": (rows, vocabulary), "limits": (rows, 3), "top_k": (rows,), "seeds": (rows,), "places": (rows,)}
    kinds = {"logits": "float32", "limits": "float32"}
    made = {name: graph.input(name, shape, kinds.get(name, "int64")) for name, shape in {**usual, **shapes}.items()}
    trio = made["seeds"], graph.arange((rows,), rows), made["places"]
    words = graph.add("npu_tokens.random_words.default", "int64", (rows, 2), *trio, name="words")
    given = (made[name] for name in ("logits", "limits", "top_k"))
    tokens = graph.add("npu_tokens.draw.default", "int64", (rows,), *given, words, name="tokens")
    return graph.build("draw", (words, tokens), compute_dtype="bfloat16")


@cache
def executor(device: Device, rows: int, vocabulary: int) -> Executor:
    return Executor(npu_compiler.compile(draw_ir(rows, vocabulary), device.target, "bfloat16"), device)


def signed(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def drawn(
    device: Device, logits: NDArray[np.float32], samplings: list[LaneSampling], position: int
) -> tuple[list[list[int]], list[int]]:
    """The random words of each row, and its token."""
    rows, vocabulary = logits.shape
    inputs = {
        "logits": logits,
        "limits": limits_of(samplings),
        "top_k": np.array([s.top_k for s in samplings]),
        "seeds": np.array([signed(s.seed) for s in samplings]),
        "places": np.full(rows, position),
    }
    outputs = executor(device, rows, vocabulary).run(inputs)
    return outputs["words"].to_numpy().tolist(), outputs["tokens"].to_numpy().tolist()


def check(device: Device, logits: NDArray[np.float32], samplings: list[LaneSampling], position: int) -> None:
    """Compares with the reference, but where rounding decides."""
    _, tokens = drawn(device, logits, samplings, position)
    for row, sampling, token in zip(logits, samplings, tokens, strict=True):
        expected = wanted(row, sampling, position)
        assert expected.is_met_by(token), (sampling, expected)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            *((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_reference_is_philox(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """Known answers, which its authors published."""
    assert philox(counter, key) == words


@pytest.mark.parametrize("position", [0, 1, 4095, (1 << 32) + 7])
def test_random_words_are_those_of_seed_and_position(position: int, device: Device) -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 1 << 32, 123456789]
    words, _ = drawn(device, np.zeros((7, 3), np.float32), [LaneSampling(seed=seed) for seed in seeds], position)
    assert words == [list(random_words(seed, position)) for seed in seeds]


def peaked(count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    return (rng.standard_normal(count) * 3).astype(np.float32)


def flat(count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Many of them equal."""
    return np.round(rng.standard_normal(count).astype(np.float32) * 2) / np.float32(8)


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
@pytest.mark.parametrize("make", [peaked, flat])
def test_tokens_are_as_probable_as_they_are_to_be(
    sampling: LaneSampling,
    make: Callable[[int, np.random.Generator], NDArray[np.float32]],
    device: Device,
    rng: np.random.Generator,
) -> None:
    """Pearson's chi-squared test over seeds; tokens that are expected fewer than five times count as one."""
    logits = make(90, rng)
    count, expected = 600, probabilities(logits, sampling)
    samplings = [LaneSampling(**{**vars(sampling), "seed": seed}) for seed in range(count)]
    _, tokens = drawn(device, np.tile(logits, (count, 1)), samplings, 3)
    counts = np.bincount(tokens, minlength=len(logits))
    assert counts[expected == 0].sum() == 0
    often = expected * count >= 5
    found, hoped = (np.append(each[often], each[~often].sum()) for each in (counts, expected * count))
    statistic = ((found - hoped)[hoped > 0] ** 2 / hoped[hoped > 0]).sum()
    freedom = int((hoped > 0).sum()) - 1
    assert statistic <= freedom + 4 * np.sqrt(2 * freedom) + 4, "beyond four standard deviations"


SAMPLINGS = st.builds(
    LaneSampling,
    temperature=st.sampled_from([0.0, 1e-6, 0.1, 0.7, 1.0, 3.0, 1e6]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 40, 300, 1 << 40]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 1.0]),
    seed=st.integers(-(2**64), 2**64),
)


@settings(max_examples=60)
@given(
    vocabulary=st.sampled_from([1, 37, 700]),
    samplings=st.lists(SAMPLINGS, min_size=4, max_size=4),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 5.0, 40.0]),
    in_steps=st.booleans(),
    position=st.integers(0, 1 << 40),
    number=st.integers(0, 1 << 30),
)
def test_draws_are_those_of_the_reference(
    device: Device,
    vocabulary: int,
    samplings: list[LaneSampling],
    spread: float,
    in_steps: bool,
    position: int,
    number: int,
) -> None:
    logits = np.random.default_rng(number).standard_normal((4, vocabulary)) * spread
    check(device, (np.round(logits) if in_steps else logits).astype(np.float32), samplings, position)


@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.01, 1.0])
def test_more_likely_tokens_than_are_put_in_order_at_a_time(spread: float, device: Device) -> None:
    """Bins of many tokens are divided, down to equal logits in the order of tokens."""
    rng = np.random.default_rng(5)
    samplings = [LaneSampling(1.0, seed=1), LaneSampling(1.0, top_k=3000, seed=2), LaneSampling(1.0, top_p=0.5, seed=3)]
    samplings += [LaneSampling(2.0, top_k=4000, top_p=0.7, seed=4)]
    logits = (rng.standard_normal((4, MORE_THAN_A_LIST)) * spread + 7).astype(np.float32)
    for position in range(3):
        check(device, logits, samplings, position)


def test_the_highest_of_many_and_few_of_the_tail(device: Device) -> None:
    """Far more tokens lie far below the likeliest than near it, and yet one of them is the fiftieth."""
    logits = np.full((2, MORE_THAN_A_LIST), -15.0, np.float32)
    logits[:, ::500] = 10 - np.arange(10)
    logits += np.random.default_rng(2).standard_normal(logits.shape).astype(np.float32) * 0.1
    check(
        device, logits, [LaneSampling(1.0, top_k=50, seed=1), LaneSampling(1.0, top_k=50, top_p=0.9999999, seed=8)], 1
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_are_told(wrong: float, device: Device) -> None:
    logits = np.zeros((3, 400), np.float32)
    logits[0], logits[1, 17] = wrong, wrong
    _, tokens = drawn(device, logits, [LaneSampling(1.0), LaneSampling(1.0), LaneSampling(0.0)], 0)
    assert tokens[0] == -1
    assert tokens[2] == 0
    assert (tokens[1] == -1) == (wrong != float("-inf"))
    assert tokens[1] != 17


def test_signed_zeros_are_equal(device: Device) -> None:
    logits = np.array([[-1.0, -0.0, 0.0, -0.0]], np.float32)
    assert drawn(device, logits, [LaneSampling(0.0)], 0)[1] == [1]
    assert drawn(device, logits, [LaneSampling(1.0, top_k=1)], 0)[1] == [1]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"limits": (3, 2)}, r"expected \[R, V\], \[R, 3\], \[R\] and \[R, 2\]"),
        ({"logits": (3, 4, 5)}, r"expected \[R, V\]"),
        ({"logits": (3, 0)}, "expected 1 to 4194304"),
        ({"places": (1,)}, r"expected int64 \[L\], \[R\] and \[R\]"),
    ],
)
def test_what_no_kernel_draws_is_refused(shapes: dict[str, tuple[int, ...]], words: str) -> None:
    for target in ("metal", "cuda"):
        with pytest.raises(UnsupportedOpError, match=words):
            npu_compiler.compile(draw_ir(3, 4, **shapes), target, "bfloat16")


def test_no_limit_leads_out_of_the_vocabulary(device: Device, rng: np.random.Generator) -> None:
    rows = len(HOSTILE_LIMITS)
    logits = peaked(rows * 700, rng).reshape(rows, 700)
    settings = {"limits": HOSTILE_LIMITS, "top_k": HOSTILE_TOP_K}
    places = {"seeds": np.arange(rows), "places": np.full(rows, 3)}
    outputs = executor(device, rows, 700).run({"logits": logits, **settings, **places})
    check_hostile(outputs["tokens"].to_numpy(), logits)
