"""Tokens chosen on the device: the same as the host's, whenever the reader stops, and a sequence that can go on."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from npu_compiler.errors import DeviceError
from npu_compiler.graph.next_token import NO_NUMBER
from npu_runtime import Device, Generator, NPUBuffer
from npu_runtime.backend import Recording
from npu_text.device_decoding import decode_on_device
from npu_text.generator import Decoding
from npu_text.host_decoding import decode_on_host
from npu_text.sampling import Sampling
from npu_text.step_functions import write_number
from tests.support.decoders import Decoder, fill_weights
from tests.support.next_token import NextToken

PROMPT = [5, 6, 7, 8, 9]
GREEDY = Sampling()


@pytest.fixture(scope="module")
def on_device(qwen: Decoder, device: Device) -> Generator:
    return Generator(qwen.folder, device, decoding=decode_on_device)


def ids(generator: Generator, *args: Any, **options: Any) -> list[int]:
    return [token.id for token in generator.generate(*args, **options)]


@pytest.mark.parametrize("vocabulary", [1, 7, 320, 997, 4096, 5000])
def test_the_first_of_the_highest_is_chosen(vocabulary: int, device: Device, rng: np.random.Generator) -> None:
    """Rounded to bfloat16, many logits are equal."""
    choose = NextToken(device, vocabulary)
    for _ in range(3):
        logits = rng.standard_normal(vocabulary).astype(ml_dtypes.bfloat16)
        assert choose(logits, 3) == logits.argmax()


def test_equal_logits_choose_the_first_token(device: Device) -> None:
    assert NextToken(device, 640)(np.full(640, -3), 3) == 0


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 500, 639])
def test_logits_that_are_no_numbers_are_told(wrong: float, place: int, device: Device) -> None:
    choose, logits = NextToken(device, 640), np.linspace(-1, 1, 640).astype(ml_dtypes.bfloat16)
    logits[place] = wrong
    assert choose(logits, 3) == NO_NUMBER
    logits[place] = float("-inf")
    assert choose(logits, 3) == logits.argmax()


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_tokens_are_those_of_the_host(generator: Generator, on_device: Generator, count: int) -> None:
    assert ids(on_device, PROMPT, count) == ids(generator, PROMPT, count)


def test_a_full_cache_ends_the_text(generator: Generator, on_device: Generator) -> None:
    prompt = [7] * 120
    generation = on_device.generate(prompt)
    assert [token.id for token in generation] == ids(generator, prompt)
    assert generation.finish == "cache"
    assert len(ids(on_device, [7] * 128)) == 1


def test_stop_tokens_end_a_text(generator: Generator, on_device: Generator) -> None:
    expected = ids(generator, PROMPT, 20)
    stop = next(token for token in expected[2:] if token not in expected[:2])
    assert ids(on_device, PROMPT, 20, stop=[stop]) == expected[: expected.index(stop) + 1]


def test_texts_in_turns(generator: Generator, on_device: Generator) -> None:
    prompts = (PROMPT, PROMPT[::-1])
    turns = list(zip(*(on_device.generate(prompt, 8) for prompt in prompts), strict=True))
    given = [[token.id for token in text] for text in zip(*turns, strict=True)]
    assert given == [ids(generator, prompt, 8) for prompt in prompts]


def test_a_sequence_goes_on_after_the_loop(generator: Generator) -> None:
    """Steps beyond the reader's last token leave no trace that counts."""
    model = generator.model
    logits = []
    for decoding in (decode_on_device, None):
        sequence = model.begin()
        if decoding is not None:
            tokens = decoding(sequence, GREEDY, 30)(sequence.advance(PROMPT))
            text = [next(tokens) for _ in range(4)]
            tokens.close()  # type: ignore[attr-defined]
            assert sequence.tokens == PROMPT + text[:-1]
        else:
            sequence.advance(PROMPT + text[:-1])
        last = sequence.advance([text[-1], 11, 12, 13])
        assert isinstance(last, NPUBuffer)
        logits.append(last.to_numpy().astype(np.float32))
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-2)


def test_the_device_is_kept_busy(on_device: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a token is waited for, the next steps are asked for; never more than the text may need."""
    events: list[str] = []

    class Watched(Recording):
        def launch(self) -> Any:
            events.append("launch")
            wait = super().launch()

            def waited() -> None:
                events.append("wait")
                wait()

            return waited

    monkeypatch.setattr(on_device.model.device.backend, "record", lambda bound: Watched(bound))
    generation = on_device.generate(PROMPT, 9)
    assert events == []
    next(generation)
    next(generation)
    assert events == ["launch"] * 5 + ["wait"]
    next(generation)
    assert events == ["launch"] * 5 + ["wait", "launch", "wait"]
    assert len(list(generation)) == 6
    assert events.count("launch") == events.count("wait") == 8


def test_steps_that_are_not_read_are_waited_for(on_device: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: set[int] = set()

    class Counted(Recording):
        def launch(self) -> Any:
            super().launch()
            number = len(launched)
            launched.append(number)
            waiting.add(number)
            return lambda: waiting.remove(number)

    launched: list[int] = []
    monkeypatch.setattr(on_device.model.device.backend, "record", lambda bound: Counted(bound))
    expected = ids(on_device, PROMPT, 20)
    assert len(launched) == 19
    stop = next(token for token in expected[2:] if token not in expected[:2])
    ids(on_device, PROMPT, 30, stop=[stop])
    assert len(launched) == 19 + expected.index(stop) + 4
    assert waiting == set()


@pytest.mark.parametrize("decoding", [decode_on_device, decode_on_host])
def test_a_step_that_gives_no_numbers_ends_the_text(decoding: Decoding, qwen: Decoder, device: Device) -> None:
    generator = Generator(qwen.folder, device, decoding=decoding)
    generation = generator.generate(PROMPT, 10)
    next(generation)
    fill_weights(generator, 0x7F)
    with pytest.raises(DeviceError, match="the model gave no number as highest logit"):
        list(generation)


def test_a_device_that_runs_ahead_decodes_by_itself(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(generator, PROMPT, 6)
    asked: list[str] = []
    backend = generator.model.device.backend

    class Watched(Recording):
        def launch(self) -> Any:
            asked.append("ahead")
            return super().launch()

        def replay(self, *, sync: bool, stream: Any) -> None:
            asked.append("alone")
            Recording.launch(self)()

    monkeypatch.setattr(backend, "record", lambda bound: Watched(bound))
    assert ids(generator, PROMPT, 6) == expected
    assert asked == ["alone"] * 5
    monkeypatch.setattr(backend, "runs_ahead", True)
    assert ids(generator, PROMPT, 6) == expected
    assert asked == ["alone"] * 5 + ["ahead"] * 5


def test_the_host_writes_only_what_the_device_does_not_hold(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = write_number

    def counted(buffer: NPUBuffer, number: int) -> None:
        written.append(number)
        write(buffer, number)

    monkeypatch.setattr("npu_text.chosen_steps.write_number", counted)
    sequence = generator.model.begin()
    tokens = decode_on_host(sequence, GREEDY, 30)(sequence.advance(PROMPT))
    text = [next(tokens) for _ in range(5)]
    assert written == [text[0], len(PROMPT)]
    sequence.advance([11])
    text.append(next(tokens))
    assert written == [text[0], len(PROMPT), text[4], len(PROMPT) + 5]
