"""Tokens that the device draws behind a step: the host's own, whoever asks for the steps, and a server's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import npu_compiler
from npu_compiler.dtypes import BFLOAT16
from npu_compiler.errors import DeviceError
from npu_compiler.graph.next_token import NO_NUMBER, next_token_ir
from npu_compiler.tensor.layout import BufferSpec, dense
from npu_runtime import Device, Executor, Generator, NPUBuffer
from npu_text.batching.choosing import LaneChooser, LaneRow
from npu_text.batching.engine import LaneSampling
from npu_text.device_decoding import decode_on_device
from npu_text.sampling import Sampler, Sampling
from tests.support.decoders import Decoder, fill_weights

PROMPT = [5, 6, 7, 8, 9]
PLACES = 6
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


class Choice:
    """The function of a vocabulary, on memory that stays."""

    def __init__(self, device: Device, vocabulary: int) -> None:
        ir = next_token_ir(vocabulary, "bfloat16", PLACES, drawn=True)
        program = npu_compiler.compile(ir, device.target, "bfloat16")
        self._executor, self._device = Executor(program, device), device
        self._specs = {spec.name: spec for spec in program.input_specs}
        assert dict(program.main.state) == {"all_chosen": "chosen"}

    def __call__(self, logits: NDArray[Any], sampler: Sampler, position: int) -> int:
        """The token, or `NO_NUMBER`, that follows the one at a position."""
        arrays = {
            "logits": logits.astype(ml_dtypes.bfloat16).reshape(1, 1, -1),
            "positions": np.array([position]),
            "chosen": np.arange(PLACES) + 100,
            "limits": sampler.limits,
            "top_k": sampler.top_k,
            "seeds": sampler.seeds,
        }
        outputs = self._executor.run(
            {name: NPUBuffer.from_numpy(array, self._device, spec=self._specs[name]) for name, array in arrays.items()}
        )
        chosen = outputs["all_chosen"].to_numpy().tolist()
        token = int(chosen.pop(position))
        assert chosen == [100 + place for place in range(PLACES) if place != position]
        assert outputs["tokens"].to_numpy().item() == max(0, token)
        assert outputs["next_positions"].to_numpy().item() == position + 1
        return token


def rounded(logits: NDArray[Any]) -> NDArray[Any]:
    """As bfloat16 has them, so that many are equal."""
    return logits.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 997])
def test_device_and_host_choose_alike(vocabulary: int, device: Device, rng: np.random.Generator) -> None:
    choice, others = Choice(device, vocabulary), 0
    for number, options in enumerate(OPTIONS * 2):
        sampler = Sampler(Sampling(**options, seed=number))
        logits = rounded(rng.standard_normal(vocabulary) * (3 if number % 2 else 0.2))
        others += choice(logits, sampler, number % PLACES) != sampler.choose(logits, number % PLACES + 1)
    assert others <= 1, "weights round otherwise"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_lane_of_a_server_draws_the_same(options: dict[str, Any], device: Device, rng: np.random.Generator) -> None:
    chooser, choice, sampler = (
        LaneChooser(device, 320, "bfloat16", 1),
        Choice(device, 320),
        Sampler(Sampling(**options, seed=9)),
    )
    given = {name: value for name, value in options.items() if value}
    chooser.begin(0, LaneSampling(**given, seed=9), [])
    spec = BufferSpec("logits", BFLOAT16, BFLOAT16, dense((1, 320)))
    for position in range(PLACES):
        logits = rounded(rng.standard_normal(320) * 2)
        buffer = NPUBuffer.from_numpy(logits.reshape(1, -1), device, spec=spec)
        (chosen,) = chooser.choose(buffer, [LaneRow(0, position + 1)])()
        assert chosen.token == choice(logits, sampler, position)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], OPTIONS[7]], ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 500, 639])
def test_logits_that_are_no_numbers_are_told(options: dict[str, Any], wrong: float, place: int, device: Device) -> None:
    logits, sampler, choice = np.linspace(-1, 1, 640), Sampler(Sampling(**options, seed=1)), Choice(device, 640)
    logits[place] = wrong
    assert choice(logits, sampler, 2) == NO_NUMBER
    assert choice(np.full(640, float("-inf")), sampler, 2) == NO_NUMBER
    logits[place] = 0
    assert choice(logits, sampler, 2) >= 0


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
    model, sampler = generator.model, Sampler(Sampling(0.8, top_p=0.95, seed=2))
    sequence, again = model.begin(), model.begin()
    tokens = decode_on_device(sequence, sampler, 30)(sequence.advance(PROMPT))
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
