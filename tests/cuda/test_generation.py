"""Texts on a CUDA device: tokens chosen by the device are the host's, in turns, in threads, and when a text goes on."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from npu_runtime import Device, Generator, NPUBuffer
from npu_text.device_decoding import decode_on_device
from npu_text.host_decoding import decode_on_host
from npu_text.sampling import Sampling
from tests.support.decoders import Decoder, make_decoder

PROMPTS = ([5, 6, 7, 8, 9], [300, 2, 11], list(range(40, 63)), [1])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Of few layers, with a cache of 512 tokens."""
    return make_decoder(tmp_path_factory.mktemp("qwen"), "Qwen2", 512, (16, 48), max_position_embeddings=512)


@pytest.fixture(scope="module")
def on_host(qwen: Decoder, device: Device) -> Generator:
    return Generator(qwen.folder, device, decoding=decode_on_host)


@pytest.fixture(scope="module")
def generator(qwen: Decoder, device: Device) -> Generator:
    return Generator(qwen.folder, device)


def ids(generator: Generator, prompt: list[int], count: int | None) -> list[int]:
    return [token.id for token in generator.generate(prompt, count)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_256_tokens_are_those_of_the_host(generator: Generator, on_host: Generator, prompt: list[int]) -> None:
    assert ids(generator, prompt, 256) == ids(on_host, prompt, 256)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.95}, {"top_k": 20}, {"top_p": 0.1}], ids=str)
def test_drawn_tokens_are_those_of_the_host(
    generator: Generator, on_host: Generator, options: dict[str, float]
) -> None:
    drawn, expected = (
        [token.id for token in each.generate(PROMPTS[0], 60, temperature=0.8, seed=3, **options)]  # type: ignore[arg-type]
        for each in (generator, on_host)
    )
    assert drawn == expected


def test_a_full_cache_ends_the_text(generator: Generator, on_host: Generator) -> None:
    assert ids(generator, [7] * 400, None) == ids(on_host, [7] * 400, None)


def test_texts_in_turns(generator: Generator, on_host: Generator) -> None:
    turns = zip(*(generator.generate(prompt, 60) for prompt in PROMPTS), strict=True)
    texts = [[token.id for token in text] for text in zip(*turns, strict=True)]
    assert texts == [ids(on_host, prompt, 60) for prompt in PROMPTS]


def test_texts_in_threads(generator: Generator, on_host: Generator) -> None:
    """Also while another thread makes a text with the host's choice, of the same functions."""
    expected = [ids(on_host, prompt, 100) for prompt in PROMPTS]
    texts: dict[int, list[list[int]]] = {}

    def run(number: int) -> None:
        chosen = on_host if number == 3 else generator
        texts[number] = [ids(chosen, PROMPTS[number], 100) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[number] for number in range(len(PROMPTS))] == [[text] * 3 for text in expected]


def test_a_sequence_goes_on_after_the_loop(generator: Generator) -> None:
    greedy = Sampling()
    sequence = generator.model.begin()
    tokens = decode_on_device(sequence, greedy, 100)(sequence.advance(PROMPTS[0]))
    text = [next(tokens) for _ in range(20)]
    tokens.close()  # type: ignore[attr-defined]
    again = generator.model.begin()
    again.advance(PROMPTS[0])
    for token in text[:-1]:
        again.advance([token])
    given, expected = (each.advance([text[-1], 11, 12, 13]) for each in (sequence, again))
    assert isinstance(given, NPUBuffer)
    assert isinstance(expected, NPUBuffer)
    np.testing.assert_array_equal(given.to_numpy(), expected.to_numpy())


def test_generation_takes_no_memory_along(generator: Generator) -> None:
    cupy = pytest.importorskip("cupy")
    pool = cupy.get_default_memory_pool()
    for _ in range(6):
        ids(generator, PROMPTS[0], 20)
    held = pool.total_bytes()
    for _ in range(6):
        ids(generator, PROMPTS[0], 20)
    assert pool.total_bytes() == held


def test_a_process_may_end_in_the_middle_of_a_text(qwen: Decoder, device: Device) -> None:
    script = (
        "from npu_runtime import Generator; "
        f"text = Generator({str(qwen.folder)!r}, 'cuda').generate({PROMPTS[0]}, 300); "
        "print(*(next(text).id for _ in range(3)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 3, done.stderr
