"""A batch over pages of codes: each text as it would be alone over a cache of codes, and what folders say of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_cli.main import main
from npu_compiler.artifact.generation_spec import FILE_NAME, GenerationSpec
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import IRError, NPUError
from npu_compiler.frontend.decoder_request import BatchRequest
from npu_runtime import Device, Generator
from npu_text.batching.engine import LaneSampling
from npu_text.batching.paged_engine import PagedEngine
from tests.language.test_paged_engine import Text, go_on, last_of, prompt, steps_of
from tests.support.decoders import Decoder, config, make_decoder

SIZE, PAGE = 32, 64  # of a head, of a page


@pytest.fixture(scope="module", params=["software-metal", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    try:
        return Device(request.param)
    except NPUError as error:
        pytest.skip(f"no such device: {error}")


@pytest.fixture(scope="module", params=["int8", "fp8"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A Qwen2.5 whose texts have 256 tokens: four pages."""
    batch = BatchRequest((4,), PAGE, pages=14, chunks=(64,), guess=4)
    place = tmp_path_factory.mktemp("coded")
    return make_decoder(place, "Qwen2", 256, (16,), batch, kv_cache=request.param, hidden_size=4 * SIZE)


@pytest.fixture(scope="module")
def engine(device: Device, decoder: Decoder) -> PagedEngine:
    return PagedEngine(decoder.folder, device)


def check_single(generator: Generator, given: Sequence[int], tokens: Sequence[int]) -> None:
    """Whether tokens are those of one text alone over a cache of codes, up to a near tie."""
    alone = [token.id for token in generator.generate(list(given), len(tokens))]
    first = next((i for i, (a, b) in enumerate(zip(alone, tokens, strict=True)) if a != b), None)
    if first is None:
        return
    sequence = generator.model.begin()
    row: Any = sequence.advance([*given, *alone[:first]])
    logits = np.asarray(row).astype(np.float32).reshape(-1)
    assert logits[alone[first]] - logits[tokens[first]] <= 0.02 * np.abs(logits).max()


def test_texts_of_different_lengths_are_those_of_one_text_alone(
    device: Device, engine: PagedEngine, decoder: Decoder
) -> None:
    generator = Generator(decoder.folder, device)
    places = [(3, [5]), (40, [7]), (190, [9, 13, 2, 4])]
    texts = [Text(engine, lane, prompt(length, lane), pages).fill() for lane, (length, pages) in enumerate(places)]
    go_on(texts, 12)
    for text in texts:
        check_single(generator, text.prompt, text.tokens)


def test_a_text_is_the_same_in_any_company(engine: PagedEngine) -> None:
    alone = last_of(engine, [(0, 3, [1]), (1, 60, [2, 3])])
    assert last_of(engine, [(3, 90, [4, 5]), (0, 20, [8]), (2, 60, [13, 0])]) == alone


def test_a_copied_page_has_its_scales(engine: PagedEngine) -> None:
    given = prompt(100, 1)
    first = Text(engine, 0, given, [3, 4]).fill()
    engine.copy_page(4, 11)
    Text(engine, 2, prompt(70, 2), [8, 4]).fill()  # of another text by now
    second = Text(engine, 1, given, [3, 11])
    second.tokens = first.tokens[:1]
    first.pages = [3, 12]
    engine.copy_page(11, 12)
    go_on([first, second], 8)
    assert second.tokens == first.tokens
    alone = Text(engine, 1, given, [6, 7]).fill()
    go_on([first, alone], 1)
    assert alone.tokens == second.tokens[:2]


def test_guesses_change_no_text(engine: PagedEngine) -> None:
    alone = Text(engine, 0, prompt(60), [0, 1]).fill()
    go_on([alone], 9)
    text = Text(engine, 1, prompt(60), [2, 3], LaneSampling()).fill()
    while len(text.tokens) < 10:
        guess = alone.tokens[len(text.tokens) :][:3]
        text.tokens += [choice.token for choice in engine.step(steps_of([text], [guess]))().chosen(0)]
    assert text.tokens[:10] == alone.tokens


def test_each_function_updates_codes_and_scales_in_place(device: Device, decoder: Decoder, engine: PagedEngine) -> None:
    spec = GenerationSpec.load(decoder.folder).batch
    assert spec is not None
    (path,) = decoder.folder.glob(f"*batch*{device.target}*.npubin")
    program = CompiledProgram.load(path)
    for name, step in spec.functions.items():
        assert {*program.functions[name].state} == {(new, old) for old, new in step.pools}


def test_what_the_folder_says(decoder: Decoder, tmp_path: Path) -> None:
    spec = GenerationSpec.load(decoder.folder)
    assert spec.batch is not None
    codes, scales = spec.batch.pools(spec.dtype)[:2]
    assert codes == ((15, 2, PAGE, SIZE), spec.cache_dtypes[0])
    assert scales == ((15, 2, PAGE, 1), "float32")
    assert len(spec.batch.pool_shapes) == len(spec.batch.pool_dtypes) == 8
    content = json.loads((decoder.folder / FILE_NAME).read_text())
    for wrong in (["int8"], ["int8", "nothing"] * 4):
        content["batch"]["pool_dtypes"] = wrong
        (tmp_path / FILE_NAME).write_text(json.dumps(content))
        with pytest.raises(IRError, match="expected one for each"):
            GenerationSpec.load(tmp_path)


def test_both_options_of_the_command(tmp_path: Path) -> None:
    config("Qwen2").save_pretrained(tmp_path / "source")
    arguments = ["extract-llm", str(tmp_path / "source"), "-o", str(tmp_path / "m"), "--cache", "64", "--prefill", "8"]
    assert main([*arguments, "--lanes", "2", "--page-tokens", "32", "--chunks", "16", "--kv-cache-dtype", "fp8"]) == 0
    batch = GenerationSpec.load(tmp_path / "m").batch
    assert batch is not None
    assert batch.pool_dtypes[:2] == ("float8_e4m3fn", "float32")
