"""Tokens that the device draws: the host's with the same random numbers, and as probable as they are to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import npu_compiler
from npu_compiler.errors import DeviceError
from npu_compiler.graph.next_token import NO_NUMBER
from npu_compiler.graph.sampled_token import SLOTS, UNDECIDED, sampled_token_ir
from npu_compiler.graph.token_matrix import as_matrix
from npu_runtime import Device, Executor, Generator, NPUBuffer
from npu_runtime.backend import BoundPlan, Recording
from npu_text.device_decoding import can_decode_on_device, decode_on_device
from npu_text.sampling import Sampler, Sampling
from npu_text.token_rows import TokenRows
from tests.support.decoders import Decoder, fill_weights

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
]


class Choice:
    """The function of a vocabulary, on memory that stays."""

    def __init__(self, device: Device, vocabulary: int, sampling: Sampling) -> None:
        drawing = sampling.drawing
        assert drawing is not None
        ir = sampled_token_ir(vocabulary, "bfloat16", SLOTS, drawing.tries, tuple(drawing.limits))
        program = npu_compiler.compile(ir, device.target, "bfloat16")
        self._executor = Executor(program, device)
        inverse = min(1 / sampling.temperature, float(np.finfo(np.float32).max))
        arrays = {
            "logits": np.zeros((1, 1, vocabulary), ml_dtypes.bfloat16),
            "positions": np.array([3]),
            "chosen": np.arange(SLOTS) + 100,
            "inverse_temperature": np.array([inverse], np.float32),
            **{name: np.array([limit], np.float32) for name, limit in drawing.limits.items()},
            "draws": np.full((SLOTS, drawing.tries + 1, 2), np.nan, np.float32),
        }
        self._inputs = {
            spec.name: NPUBuffer.from_numpy(arrays[spec.name], device, spec=spec) for spec in program.input_specs
        }
        assert dict(program.main.state) == {"all_chosen": "chosen"}

    def __call__(self, logits: NDArray[Any] | None, draws: NDArray[np.float32]) -> int:
        """The token, `UNDECIDED` or `NO_NUMBER`, at position 3; of the last logits where None are given."""
        if logits is not None:
            self._write("logits", logits)
        with self._inputs["draws"].data.writing() as memory:
            self._inputs["draws"].spec.layout.view(memory.view(np.float32))[3] = draws
        outputs = self._executor.run(self._inputs)
        chosen = outputs["all_chosen"].to_numpy().tolist()
        assert chosen[:3] + chosen[4:] == [100, 101, 102, 104, 105, 106, 107]
        assert outputs["tokens"].to_numpy().item() == max(0, chosen[3])
        assert outputs["next_positions"].to_numpy().item() == 4
        return int(chosen[3])

    def _write(self, name: str, logits: NDArray[Any]) -> None:
        buffer = self._inputs[name]
        with buffer.data.writing() as memory:
            buffer.spec.encode_into(logits.astype(ml_dtypes.bfloat16).reshape(1, 1, -1), memory)


def probabilities(logits: NDArray[Any], sampling: Sampling) -> NDArray[np.float64]:
    """What each token is to be chosen with, by sorting all of them."""
    wide = logits.astype(np.float64)
    weights = np.exp((wide - wide.max()) / sampling.temperature)
    order = np.argsort(-wide, kind="stable")[: sampling.top_k]
    reached = weights[order].cumsum() / weights[order].sum()
    count = len(order) if sampling.top_p is None else int((reached < sampling.top_p).sum()) + 1
    kept = np.zeros(len(logits))
    kept[order[:count]] = weights[order[:count]]
    kept /= kept.sum()
    return kept


def check_distribution(drawn: NDArray[np.intp], expected: NDArray[np.float64]) -> None:
    """Pearson's chi-squared test; tokens that are expected fewer than five times count as one."""
    counts = np.bincount(drawn, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    often = expected * len(drawn) >= 5
    found = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum()) * len(drawn)
    keep = wanted > 0
    statistic = ((found - wanted)[keep] ** 2 / wanted[keep]).sum()
    freedom = int(keep.sum()) - 1
    assert statistic <= freedom + 4 * np.sqrt(2 * freedom) + 4, "beyond four standard deviations"


def peaked(count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = (rng.standard_normal(count) * 3).astype(ml_dtypes.bfloat16).astype(np.float32)
    return logits


def flat(count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Many of them equal."""
    return np.round(rng.standard_normal(count).astype(np.float32) * 2) / np.float32(8)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 90, 320, 997])
def test_every_token_has_one_place(vocabulary: int) -> None:
    rows, columns = as_matrix(vocabulary)
    assert rows * columns - columns < vocabulary <= rows * columns


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", [peaked, flat])
def test_the_host_chooses_by_probability(
    options: dict[str, Any], make: Callable[[int, np.random.Generator], NDArray[np.float32]], rng: np.random.Generator
) -> None:
    logits, sampler = make(90, rng), Sampler(Sampling(**options, seed=4))
    drawn = np.array([sampler.choose(logits) for _ in range(2500)])
    check_distribution(drawn, probabilities(logits, sampler.sampling))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", [peaked, flat])
def test_the_device_chooses_by_probability(
    options: dict[str, Any],
    make: Callable[[int, np.random.Generator], NDArray[np.float32]],
    device: Device,
    rng: np.random.Generator,
) -> None:
    """With the host for what the device leaves undecided; and with the host's own choices."""
    logits, sampler = make(90, rng), Sampler(Sampling(**options, seed=5))
    choice = Choice(device, len(logits), sampler.sampling)
    choice(logits, sampler.draws())
    drawn, others = [], 0
    for _ in range(500):
        draws = sampler.draws()
        token, expected = choice(None, draws), sampler.choose(logits, draws)
        drawn.append(expected if token == UNDECIDED else token)
        others += drawn[-1] != expected
    assert others <= 2, "sums round otherwise"
    check_distribution(np.array(drawn), probabilities(logits, sampler.sampling))


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 997])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_device_and_host_choose_alike(
    vocabulary: int, options: dict[str, Any], device: Device, rng: np.random.Generator
) -> None:
    sampler = Sampler(Sampling(**options, seed=6))
    choice = Choice(device, vocabulary, sampler.sampling)
    others = undecided = 0
    for number in range(20):
        logits, draws = (peaked, flat)[number % 2](vocabulary, rng), sampler.draws()
        rows = TokenRows.of(logits, sampler.inverse_temperature)
        token, expected = choice(logits, draws), sampler._drawn(rows, draws, sampler._few_candidates(rows))
        if token == UNDECIDED:
            undecided += expected is not None
        else:
            others += token != expected
    assert others <= 1, "sums round otherwise"
    assert undecided <= (10 if {"top_k", "top_p"} <= options.keys() else 1)


@pytest.mark.parametrize("share", [0.0, 1 - 2.0**-24])
def test_the_ends_of_the_random_numbers(share: float, device: Device) -> None:
    """Neither reaches a token that is impossible, or a place behind the last."""
    logits = np.full(90, -np.inf, np.float32)
    logits[[13, 14, 40, 77]] = 0.0, -3.0, 2.0, 1.0
    for temperature in (1e-30, 1.0, 1e30):
        sampling = Sampling(temperature)
        draws = np.full((2, 2), share, np.float32)
        expected = (13 if share == 0 else 77) if temperature > 1e-3 else 40
        assert Choice(device, 90, sampling)(logits, draws) == expected
        assert Sampler(sampling).choose(logits, draws) == expected


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 500, 639])
def test_logits_that_are_no_numbers_are_told(options: dict[str, Any], wrong: float, place: int, device: Device) -> None:
    logits = np.linspace(-1, 1, 640, dtype=np.float32)
    sampler = Sampler(Sampling(**options, seed=1))
    choice = Choice(device, 640, sampler.sampling)
    logits[place] = wrong
    assert choice(logits, sampler.draws()) == NO_NUMBER
    assert choice(np.full(640, float("-inf")), sampler.draws()) == NO_NUMBER
    logits[place] = 0
    assert choice(logits, sampler.draws()) >= 0


@pytest.fixture(scope="module")
def on_device(qwen: Decoder, device: Device) -> Generator:
    return Generator(qwen.folder, device, decoding=decode_on_device)


def ids(generator: Generator, count: int | None, **options: Any) -> list[int]:
    return [token.id for token in generator.generate(PROMPT, count, **options)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_texts_are_those_of_the_host(generator: Generator, on_device: Generator, options: dict[str, Any]) -> None:
    for seed in range(2):
        assert ids(on_device, 24, **options, seed=seed) == ids(generator, 24, **options, seed=seed)
    assert ids(on_device, 24, **options, seed=0)[:1] == ids(on_device, 1, **options, seed=0)


def test_a_full_cache_ends_the_text(generator: Generator, on_device: Generator) -> None:
    options = {"temperature": 0.8, "top_p": 0.95, "seed": 3}
    assert ids(on_device, None, **options) == ids(generator, None, **options)


def test_what_the_device_leaves_undecided_the_host_chooses(generator: Generator, monkeypatch: Any) -> None:
    """Steps that were asked for ahead run again behind the token, with the random numbers that they had."""
    undecided: list[int] = []
    monkeypatch.setattr("npu_text.sampling._TRIES", (1, 1, 1))
    advance = type(generator.model.begin()).advance
    options = {"temperature": 5.0, "top_p": 0.2, "seed": 8}
    expected = ids(generator, 40, **options)

    def counted(sequence: Any, tokens: Any) -> Any:
        undecided.append(len(sequence.tokens))
        return advance(sequence, tokens)

    monkeypatch.setattr("npu_text.language_model.TokenSequence.advance", counted)
    monkeypatch.setattr(generator, "_decoding", decode_on_device)
    assert ids(generator, 40, **options) == expected
    assert len(undecided) > 20, "most"


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


def test_what_is_drawn_on_a_device_that_runs_ahead(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    both: dict[str, Any] = {"temperature": 0.8, "top_k": 65, "top_p": 0.9}
    assert all(can_decode_on_device(generator.model, Sampler(Sampling(**options))) for options in OPTIONS)
    assert not can_decode_on_device(generator.model, Sampler(Sampling(**both)))
    recorded: list[int] = []

    def record(bound: list[BoundPlan]) -> Recording:
        recorded.append(len(bound))
        return Recording(bound)

    backend = generator.model.device.backend
    monkeypatch.setattr(backend, "record", record)
    monkeypatch.setattr(backend, "runs_ahead", True)
    ids(generator, 6, temperature=0.8, top_p=0.95, seed=1)
    assert recorded == [2, 2]
    ids(generator, 6, **both)
    assert recorded == [2, 2, 3]
