"""`npu extract-llm` and `npu generate`, as a user types them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from npu_cli.main import main
from npu_compiler.errors import MissingDependencyError
from npu_runtime import Generator
from tests.support.decoders import config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `npu extract-llm` made of a configuration file."""
    place = tmp_path_factory.mktemp("llm")
    config("Qwen2").save_pretrained(place)
    line = ["extract-llm", str(place / "config.json"), "-o", str(place / "model"), "--cache", "64", "--prefill", "16"]
    assert main(line) == 0
    return place / "model"


def test_the_folder(model: Path) -> None:
    names = {path.name for path in model.iterdir()}
    assert names >= {"decode.json", "prefill_16.json", "generation.json", "model.safetensors"}


def test_ids_are_streamed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(model), "--ids", "5,6,7", "--max-tokens", "6", "--device", "software-metal"]) == 0
    captured = capsys.readouterr()
    expected = [token.id for token in Generator(model, "software-metal").generate([5, 6, 7], 6)]
    assert [int(word) for word in captured.out.split()] == expected
    assert captured.err.startswith("3 tokens of prompt, first token after ")
    assert captured.err.rstrip().endswith("6 new tokens, ended by: as many tokens as asked for")


def test_through_partitions(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for options in ([], ["--partition"]):
        assert main(["generate", str(model), "--ids", "5,6,7", "--max-tokens", "6", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_a_seed_repeats(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text() -> str:
        options = ["--max-tokens", "8", "--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--seed", "3"]
        assert main(["generate", str(model), "--ids", "1,2", *options]) == 0
        return capsys.readouterr().out

    assert text() == text()


def test_ids_need_no_tokenizers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["generate", str(tmp_path / "model"), "--ids", "5,6,7", "--max-tokens", "2"]) == 0
    assert len(capsys.readouterr().out.split()) == 2
    assert main(["generate", str(tmp_path / "model"), "--prompt", "hello"]) == 1
    assert "npu-compiler[text]" in capsys.readouterr().err
    with pytest.raises(MissingDependencyError, match="or give token ids"):
        Generator(tmp_path / "model").generate("hello")


def test_extracting_again_leaves_no_function_behind(model: Path, tmp_path: Path) -> None:
    again = tmp_path / "model"
    shutil.copytree(model, again)
    source = str(model.parent / "config.json")
    assert main(["extract-llm", source, "-o", str(again), "--cache", "64", "--prefill", "8"]) == 0
    assert [path.name for path in again.glob("prefill_*")] == ["prefill_8.json"]
    assert (again / "decode.json").read_bytes() == (model / "decode.json").read_bytes()


def test_a_long_prompt_shows_that_it_is_read(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    assert main(["generate", str(model), "--ids", "5,6,7", "--max-tokens", "2"]) == 0
    assert "reading 3 tokens of prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], 'given no prompt; add --prompt "..." or --ids 1,2,3'),
        (["--prompt", "hello"], "given a text for a model without tokenizer"),
        (["--ids", ",".join(["1"] * 65)], "given a prompt of 65 tokens, expected at most 64"),
        (["--ids", "1", "--top-k", "5"], "at temperature 0"),
    ],
)
def test_what_users_get_wrong(
    model: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(model), *options]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_folder_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "--ids", "1"]) == 1
    assert "give a folder that `npu extract-llm` made" in capsys.readouterr().err
    assert main(["extract-llm", str(tmp_path), "-o", str(tmp_path / "model")]) == 1
    assert "expected a Hugging Face folder or config.json" in capsys.readouterr().err
