"""Texts: streaming, characters of several tokens, stop tokens, limits, timing, and what users get wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import npu_compiler
from npu_compiler.compiled_program import CompiledProgram
from npu_compiler.errors import ExtractionError, InputError, IRError, TargetMismatchError, WeightError
from npu_runtime import Device, Generator
from npu_text.generator import Timing
from npu_text.tokenizer import TextStream, load_tokenizer
from tests.support.decoders import Decoder, check_greedy, config, greedy, import_transformers

PROMPT = [5, 6, 7, 8, 9]


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8; higher tokens are no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


def pieces(text: bytes) -> list[str]:
    stream = TextStream(Bytes())
    return [*(stream.push(token) for token in text), stream.flush()]


def test_a_character_comes_when_it_is_whole() -> None:
    assert pieces("a한é".encode()) == ["a", "", "", "한", "", "é", ""]


def test_bytes_that_are_no_text_are_not_held_back_for_ever() -> None:
    assert pieces(b"\xffa\xed\x95") == ["", "�a", "", "", "�"]


def test_pieces_join_to_the_text() -> None:
    text = "Grüße, 세계! 🎉 naïve"
    assert "".join(pieces(text.encode())) == text


def test_a_tokenizer_with_words_keeps_its_spaces() -> None:
    class Words:
        """Puts a space before each word but the first, as SentencePiece does."""

        def encode(self, text: str) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: Sequence[int]) -> str:
            return " ".join(map(str, ids))

    stream = TextStream(Words())
    assert "".join(stream.push(token) for token in (3, 1, 2)) == "3 1 2"


def test_text_in_and_out(qwen: Decoder, device: Device) -> None:
    generator = Generator(qwen.folder, device, tokenizer=Bytes())
    generation = generator.generate("né", 20)
    assert generation.timing.prompt_tokens == 3
    tokens = list(generation)
    assert [token.id for token in tokens] == [token.id for token in generator.generate(list("né".encode()), 20)]
    assert "".join(token.text for token in tokens) == Bytes().decode([token.id for token in tokens])


def test_the_folders_own_tokenizer(qwen: Decoder, device: Device, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    folder = shutil.copytree(qwen.folder, tmp_path / "model")
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = list(Generator(folder, device).generate("hé", 12))
    assert "".join(token.text for token in tokens) == tokenizer.decode([token.id for token in tokens])
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="is no tokenizer"):
        load_tokenizer(folder)


def test_tokens_are_computed_when_they_are_asked_for(generator: Generator) -> None:
    generation = generator.generate(PROMPT, 10)
    assert generation.timing.new_tokens == 0
    next(generation)
    assert generation.timing.new_tokens == 1
    assert generation.timing.tokens_per_second == 0
    next(generation)
    assert generation.timing.first_token_seconds > 0
    assert generation.timing.tokens_per_second > 0
    assert generation.finish == ""
    assert len(list(generation)) == 8
    assert generation.finish == "length"
    assert next(generation, None) is None


def test_the_rate_counts_the_tokens_after_the_first() -> None:
    timing = Timing(prompt_tokens=3)
    assert timing.tokens_per_second == 0
    timing.add(2.0)
    assert (timing.first_token_seconds, timing.decode_seconds, timing.tokens_per_second) == (2.0, 0.0, 0.0)
    timing.add(0.25)
    assert timing.tokens_per_second == 4
    for seconds in (0.125, 0.125):
        timing.add(seconds)
    assert (timing.new_tokens, timing.first_token_seconds, timing.decode_seconds) == (4, 2.0, 0.5)
    assert timing.tokens_per_second == 6


def test_texts_do_not_disturb_each_other(generator: Generator) -> None:
    """Two texts in turns, each with caches of its own, give what each gives alone."""
    alone = [[token.id for token in generator.generate(prompt, 8)] for prompt in (PROMPT, PROMPT[::-1])]
    both = [generator.generate(prompt, 8) for prompt in (PROMPT, PROMPT[::-1])]
    turns = list(zip(*both, strict=True))
    assert [[token.id for token in text] for text in zip(*turns, strict=True)] == alone


def test_stop_tokens_end_a_text(qwen: Decoder, generator: Generator) -> None:
    expected = greedy(qwen, PROMPT, 20)
    stop = next(token for token in expected[2:] if token not in expected[:2])
    generation = generator.generate(PROMPT, 20, stop=[stop])
    assert [token.id for token in generation] == expected[: expected.index(stop) + 1]
    assert generation.finish == "stop"


def test_the_models_own_stop_tokens(qwen: Decoder, device: Device, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen.folder, tmp_path / "model")
    content = json.loads((folder / "generation.json").read_text())
    content["stop_ids"] = greedy(qwen, PROMPT, 1)
    (folder / "generation.json").write_text(json.dumps(content))
    generator = Generator(folder, device)
    assert len(list(generator.generate(PROMPT, 5))) == 1
    assert len(list(generator.generate(PROMPT, 5, stop=()))) == 5


def test_compiled_once(qwen: Decoder, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(qwen.folder, tmp_path / "model")
    (folder / "model.metal.npubin").unlink(missing_ok=True)
    calls: list[Any] = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return npu_compiler.compile(*args)

    monkeypatch.setattr("npu_text.step_functions.compile", counted)
    Generator(folder, device)
    Generator(folder, device)
    assert len(calls) == 1
    (folder / "model.metal.npubin").write_bytes(b"of another release")
    Generator(folder, device)
    assert len(calls) == 2
    later = (folder / "model.metal.npubin").stat().st_mtime + 10
    os.utime(folder / "decode.json", (later, later))
    Generator(folder, device)
    assert len(calls) == 3


def test_through_partitions(qwen: Decoder, device: Device) -> None:
    """With what a callback refuses on the CPU, the text is that of PyTorch."""
    irs = {name: qwen.folder / f"{name}.json" for name in ("prefill_16", "prefill_48", "decode")}
    whole = {name: npu_compiler.partition(ir, target=device.target) for name, ir in irs.items()}
    assert all(len(plan.partitions) == 1 for plan in whole.values())
    refused = ("aten.silu.default", "aten.cos.default", "aten.sin.default")
    mixed = {
        name: npu_compiler.partition(json.loads(ir.read_text()), lambda node: node["op_type"] not in refused)
        for name, ir in irs.items()
    }
    assert all(len(plan.partitions) > 4 for plan in mixed.values())
    for plans in (whole, mixed):
        generator = Generator(qwen.folder, device, plans=plans)
        check_greedy(qwen, PROMPT, [token.id for token in generator.generate(PROMPT, 32)])


def test_no_pytorch_is_needed(qwen: Decoder, generator: Generator) -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'torch_ir', 'transformers', 'tokenizers'))); "
        "from npu_runtime import Generator; "
        f"print(*(token.id for token in Generator({str(qwen.folder)!r}, 'software-metal').generate({PROMPT}, 5)))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert [int(word) for word in done.stdout.split()] == [token.id for token in generator.generate(PROMPT, 5)]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("hello", {}, "given a text for a model without tokenizer; give token ids"),
        ([], {}, "has no tokens; expected at least one"),
        ([1, 2.5], {}, "expected a text or token ids"),
        ([1] * 129, {}, "given a prompt of 129 tokens, expected at most 128, which the cache holds"),
        ([1, 320], {}, "given the token 320, expected 0 to 319"),
        ([1, -1], {}, "given the token -1"),
        ([1], {"max_new_tokens": 0}, "given max_new_tokens=0, expected at least 1"),
        ([1], {"top_p": 0.5}, "at temperature 0"),
    ],
)
def test_wrong_prompts(generator: Generator, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        generator.generate(prompt, **options)


def test_weights_of_another_model(qwen: Decoder, device: Device, tmp_path: Path) -> None:
    from npu_compiler.frontend.language_model import extract_language_model

    config("Qwen2", hidden_size=32).save_pretrained(tmp_path / "source")
    extract_language_model(tmp_path / "source", tmp_path / "other", cache_length=64, prefill=())
    folder = shutil.copytree(qwen.folder, tmp_path / "model")
    shutil.copyfile(tmp_path / "other" / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(WeightError, match=r"given shape \(32, 32\), expected \(64, 64\)"):
        Generator(folder, device)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightError, match="cannot read"):
        Generator(folder, device)


def test_a_program_for_another_target(qwen: Decoder, program: CompiledProgram, device: Device) -> None:
    from dataclasses import replace

    generator = Generator(qwen.folder, device, program=replace(program, target="other"))
    with pytest.raises(TargetMismatchError, match="compile it again"):
        generator.generate(PROMPT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "give a folder that `npu extract-llm` made"),
        ("{", "is not JSON"),
        ({"format": 2}, "is not of format 1"),
        ({"vocabulary": "many"}, r"vocabulary: given 'many'"),
        ({"weights": "../model.safetensors"}, "expected one beside it"),
        ({"cache_length": 8}, "functions of .* tokens for a cache of 8"),
        ({"cache_length": 256}, "caches of other than 256 tokens"),
        ({"cache_shapes": []}, "expected one that there is for each"),
        ({"cache_shapes": [], "cache_dtypes": []}, "does not fit the caches"),
    ],
)
def test_a_damaged_folder(qwen: Decoder, tmp_path: Path, device: Device, change: Any, message: str) -> None:
    path = tmp_path / "generation.json"
    if isinstance(change, str):
        path.write_text(change)
    elif change is not None:
        path.write_text(json.dumps(json.loads((qwen.folder / "generation.json").read_text()) | change))
    with pytest.raises(IRError, match=message):
        Generator(tmp_path, device)


def test_a_folder_of_another_program(qwen: Decoder, tmp_path: Path, device: Device, program: CompiledProgram) -> None:
    content = json.loads((qwen.folder / "generation.json").read_text())
    (tmp_path / "generation.json").write_text(json.dumps(content | {"vocabulary": 1 << 40}))
    with pytest.raises(IRError, match=r"gives '.*' of shape .*, the folder says"):
        Generator(tmp_path, device, program=program)
    del content["functions"]["decode"]
    content["functions"]["other"] = json.loads((qwen.folder / "generation.json").read_text())["functions"]["decode"]
    (tmp_path / "generation.json").write_text(json.dumps(content))
    with pytest.raises(IRError, match="names a function 'other'"):
        Generator(tmp_path, device, program=program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_length": 1000}, "given a cache of 1000 tokens, expected 1 to 256"),
        ({"cache_length": 64, "prefill": (100,)}, r"given prefill lengths \[100\], expected 2 to 64"),
        ({"dtype": "float32"}, "given dtype='float32', expected one of bfloat16, float16"),
    ],
)
def test_wrong_extractions(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    from npu_compiler.frontend.language_model import extract_language_model

    config("Qwen2").save_pretrained(tmp_path)
    with pytest.raises(ExtractionError, match=message):
        extract_language_model(tmp_path, tmp_path / "model", **options)


def test_models_that_are_no_decoders(tmp_path: Path) -> None:
    from npu_compiler.frontend.language_model import extract_language_model

    with pytest.raises(ExtractionError, match="expected a Hugging Face folder"):
        extract_language_model(tmp_path / "missing", tmp_path / "model")
    transformers = import_transformers()
    transformers.ResNetConfig().save_pretrained(tmp_path / "images")
    with pytest.raises(ExtractionError, match="of a causal language model"):
        extract_language_model(tmp_path / "images", tmp_path / "model")
