"""Tokens that the device draws behind a step: the reference's, whoever asks for the steps, and a server's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from npu_compiler.dtypes import BFLOAT16
from npu_compiler.errors import DeviceError
from npu_compiler.graph.next_token import NO_NUMBER
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime import Device, Generator, NPUBuffer
from npu_text.batching.choosing import LaneChooser, LaneRow
from npu_text.device_decoding import decode_on_device
from npu_text.sampling import Sampling
from tests.support.decoders import Decoder, fill_weights
from tests.support.lane_choice import lane_of, wanted
from tests.support.next_token import PLACES, NextToken

PROMPT = [5, 6, 7, 8, 9]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 0.7, "top_p": 0.05},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 70, "top_p": 0.8},
]


def rounded(logits: NDArray[Any]) -> NDArray[Any]:
    """As bfloat16 has them, so that many are equal."""
    return logits.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 997])
def test_choices_are_those_of_the_reference(vocabulary: int, device: Device, rng: np.random.Generator) -> None:
    choose = NextToken(device, vocabulary, drawn=True)
    for number, options in enumerate(OPTIONS * 2):
        sampling, position = Sampling(**options, seed=number), number % PLACES
        logits = rounded(rng.standard_normal(vocabulary) * (3 if number % 2 else 0.2))
        assert wanted(logits, lane_of(sampling), position + 1).is_met_by(choose(logits, position, sampling))


@pytest.mark.parametrize("temperature", [5e-324, 1e-38, 0.8, 100.0])
@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 2}, {"top_k": 1 << 70}, {"top_p": 5e-324}, {"top_k": 3, "top_p": 0.9}]
)
def test_tokens_closed_by_the_lowest_number(temperature: float, limits: dict[str, Any], device: Device) -> None:
    """They have no weight, though a difference times the inverse temperature is no float32."""
    choose = NextToken(device, 5, drawn=True)
    for closed in (-3.3895e38, float("-inf")):
        logits = np.array([closed, 9.0, closed, 9.0, closed])
        tokens = {choose(logits, place, Sampling(temperature, **limits, seed=3)) for place in range(PLACES)}
        assert tokens <= {1, 3}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_lane_of_a_server_draws_the_same(options: dict[str, Any], device: Device, rng: np.random.Generator) -> None:
    chooser, choose = LaneChooser(device, 320, "bfloat16", 1), NextToken(device, 320, drawn=True)
    sampling = Sampling(**options, seed=9)
    chooser.begin(0, lane_of(sampling), [])
    spec = BufferSpec("logits", BFLOAT16, BFLOAT16, dense((1, 320)))
    for position in range(PLACES):
        logits = rounded(rng.standard_normal(320) * 2)
        buffer = NPUBuffer.from_numpy(logits.reshape(1, -1), device, spec=spec)
        (chosen,) = chooser.choose(buffer, [LaneRow(0, position + 1)])()
        assert chosen.token == choose(logits, position, sampling)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], OPTIONS[7]], ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 500, 639])
def test_logits_that_are_no_numbers_are_told(options: dict[str, Any], wrong: float, place: int, device: Device) -> None:
    choose, sampling, logits = NextToken(device, 640, drawn=True), Sampling(**options, seed=1), np.linspace(-1, 1, 640)
    logits[place] = wrong
    assert choose(logits, 2, sampling) == NO_NUMBER
    assert choose(np.full(640, float("-inf")), 2, sampling) == NO_NUMBER
    logits[place] = 0
    assert choose(logits, 2, sampling) >= 0


@pytest.fixture(scope="module")
def on_device(qwen: Decoder, device: Device) -> Generator:
    return Generator(qwen.folder, device, decoding=decode_on_device)


def ids(generator: Generator, count: int | None, **options: Any) -> list[int]:
    return [token.id for token in generator.generate(PROMPT, count, **options)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_texts_do_not_depend_on_who_asks_for_steps(
    generator: Generator, on_device: Generator, options: dict[str, Any]
) -> None:
    for seed in range(2):
        assert ids(on_device, 24, **options, seed=seed) == ids(generator, 24, **options, seed=seed)
    assert ids(on_device, 24, **options, seed=0)[:1] == ids(on_device, 1, **options, seed=0)


def test_a_full_cache_ends_the_text(generator: Generator, on_device: Generator) -> None:
    options = {"temperature": 0.8, "top_p": 0.95, "seed": 3}
    assert ids(on_device, None, **options) == ids(generator, None, **options)


def test_a_sequence_goes_on_after_the_loop(generator: Generator) -> None:
    model, sampling = generator.model, Sampling(0.8, top_p=0.95, seed=2)
    sequence, again = model.begin(), model.begin()
    tokens = decode_on_device(sequence, sampling, 30)(sequence.advance(PROMPT))
    text = [next(tokens) for _ in range(6)]
    tokens.close()  # type: ignore[attr-defined]
    assert sequence.tokens == PROMPT + text[:-1]
    again.advance(PROMPT)
    for token in text[:-1]:
        again.advance([token])
    given, expected = (each.advance([text[-1], 11, 12, 13]) for each in (sequence, again))
    assert isinstance(given, NPUBuffer)
    assert isinstance(expected, NPUBuffer)
    assert np.array_equal(given.to_numpy(), expected.to_numpy())


def test_logits_that_are_no_numbers_end_the_text(qwen: Decoder, device: Device) -> None:
    generator = Generator(qwen.folder, device, decoding=decode_on_device)
    generation = generator.generate(PROMPT, 10, temperature=1.0, seed=1)
    next(generation)
    fill_weights(generator, 0x7F)
    with pytest.raises(DeviceError, match="the model gave no number as highest logit"):
        list(generation)
