"""What users get wrong is refused at once, and in their words."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from npu_cli.main import main
from npu_compiler import CompiledProgram, __version__
from npu_compiler.artifact.describe import counted
from npu_compiler.artifact.recipes import TRANSFORMS
from npu_compiler.errors import InputError, ProgramFormatError, WeightError
from npu_text.tokenizer import encode

_WRITTEN_OUT = "expected whole numbers with commas between them, such as 5,6,7"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate m --ids 1,x", f"--ids: given '1,x', {_WRITTEN_OUT}"),
        ("extract-llm m -o d --prefill ,", f"--prefill: given ',', {_WRITTEN_OUT}"),
        ("extract-llm m -o d --cache 1e3", "--cache: given '1e3', expected a whole number"),
        ("extract-llm m -o d --cache 0", "--cache: given 0, expected a number above 0"),
        ("extract-llm m -o d --seed 12345678901234567890123", "--seed: given 12345678901234567890123, expected 0 to"),
        ("generate m --seed 12345678901234567890123", "--seed: given 12345678901234567890123, expected 0 to"),
        ("generate m --seed " + "9" * 5000, "expected a whole number"),
        ("generate m --temperature warm", "--temperature: given 'warm', expected a number"),
        ("generate m --top-k few", "--top-k: given 'few', expected a whole number"),
        ("serve m --patience -1", "--patience: given -1.0, expected a number from 0 on"),
        ("serve m --temperature nan", "--temperature: given nan, expected a number from 0 on"),
        ("run m --top five", "--top: given 'five', expected a whole number"),
    ],
)
def test_numbers(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    assert exit_.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "invalid" not in shown


@pytest.mark.parametrize("line", ["compile x.json -o", "run x.npubin -o", "demo -o", "extract-llm x -o"])
def test_an_empty_path(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*line.split(), ""])
    assert "-o/--output: given '', expected a path" in capsys.readouterr().err


def test_a_key_that_anybody_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "m", "--api-key", ""])
    assert "--api-key: given '', expected a key" in capsys.readouterr().err


def test_no_command_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "extract-llm" in shown.err


def test_the_traceback_on_either_side_of_the_command() -> None:
    for line in (["--debug", "describe", "none.npubin"], ["describe", "none.npubin", "--debug"]):
        with pytest.raises(ProgramFormatError):
            main(line)


def test_an_interrupt_waits_for_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of one, numpy and what is built on it take an interrupt for a package that is damaged."""
    ended = []

    def slow_import(name: str) -> None:
        signal.raise_signal(signal.SIGINT)
        ended.append(name)

    monkeypatch.setattr("npu_cli.main.import_module", slow_import)
    assert main(["doctor"]) == 130
    assert ended == ["npu_cli.commands.doctor"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compile {folder}", "given the folder '{folder}', expected an IR.json"),
        ("compile {folder}/tiny.npubin", "given '{folder}/tiny.npubin', which is compiled already"),
        ("partition {folder}/tiny.npubin", "'{folder}/tiny.npubin' is not JSON but a binary file"),
        ("run {folder}/tiny.npubin -i input=x.npy -o {folder}/tiny.json", "'{folder}/tiny.json', which is no folder"),
    ],
)
def test_a_file_of_another_kind(line: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.format(folder=folder).split()) == 1
    assert message.format(folder=folder) in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"npu {__version__}\n"


def test_one_and_several() -> None:
    assert [counted(n, "launch") for n in (0, 1, 2)] == ["0 launches", "1 launch", "2 launches"]
    assert [counted(n, "other") for n in (1, 2)] == ["1 other", "2 others"]


def test_borders_come_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", str(folder / "tiny.npubin")]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"{title}: ") for title in ("inputs", "outputs", "weights", "buffers", "steps", "kernels")]
    assert places == sorted(places)
    assert "input float16[1, 3, 32, 32]" in "\n".join(text.splitlines()[:12])
    assert "1 launches" not in text


def test_an_input_that_is_given_twice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(folder / "tiny.npubin"), "-i", "input=a.npy", "-i", "input=b.npy"]) == 1
    assert "given --input input=... twice, 'a.npy' and 'b.npy'" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "message"), [(b"x", "behind its end"), (b"", "truncated")])
def test_a_program_that_is_longer_or_shorter(change: bytes, message: str, folder: Path) -> None:
    data = (folder / "tiny.npubin").read_bytes()
    with pytest.raises(ProgramFormatError, match=message):
        CompiledProgram.from_bytes(data + change if change else data[:-1])


def test_a_negative_variance_is_called_one() -> None:
    with pytest.raises(WeightError, match=r"given a variance of -1 and an epsilon of 0\.1, expected a sum above 0"):
        TRANSFORMS["fold_bias"](np.zeros(2, np.float32), np.array([1.0, -1.0], np.float32), eps=0.1)


@pytest.mark.parametrize("line", ["tune {program}", "run {program} -i input=x.npy --tune"])
def test_tuning_a_program_of_another_target(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.format(program=folder / "tiny.npubin").split()) == 1
    shown = capsys.readouterr().err
    assert "compile it again: npu compile IR.json --target cuda" in shown
    assert "software" not in shown


def test_tuning_without_cupy_names_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "cuda.npubin"
    assert main(["compile", str(folder / "tiny.json"), "--target", "cuda", "-o", str(program)]) == 0
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["tune", str(program)]) == 1
    shown = capsys.readouterr().err
    assert "npu-compiler[cuda]" in shown
    assert "software" not in shown
    assert main(["tune", str(program), "--device", "software-metal"]) == 1
    assert "given --device software-metal, expected cuda" in capsys.readouterr().err


def test_text_that_utf_8_cannot_hold() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, ids: object) -> str:
            return ""

    with pytest.raises(InputError, match="no Unicode text"):
        encode(Letters(), "\udcff")


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 256}))
    return folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Qwen/Qwen2.5 -o out", "download one first: hf download Qwen/Qwen2.5 --local-dir Qwen2.5"),
        ("Qwen2,5 -o out", "given 'Qwen2,5', which does not exist; expected a Hugging Face folder or config.json"),
        ("{model} -o out --cache 257", "given a cache of 257 tokens, expected 1 to 256"),
        ("{model} -o out --prefill 512", "given prefill lengths [512], expected 2 to 256"),
        ("{model} -o out --cache 64 --prefill 16,128", "given prefill lengths [16, 128], expected 2 to 64"),
        ("{model} -o {model}", "the model is read from it, and its weights would be overwritten"),
        ("{model}/config.json -o {model}", "the model is read from it"),
        ("{model} -o {model}/config.json", "it is no folder"),
    ],
)
def test_language_models_are_refused_before_torch_is_imported(
    line: str, message: str, configuration: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("npu_cli.commands.extract_llm.import_extra", lambda *_: pytest.fail("imports"))
    assert main(["extract-llm", *line.format(model=configuration).split()]) == 1
    assert message in capsys.readouterr().err


def test_linked_weights_are_not_overwritten(
    configuration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (configuration / "model.safetensors").write_bytes(b"a checkpoint")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").symlink_to(configuration / "model.safetensors")
    assert main(["extract-llm", str(configuration), "-o", str(tmp_path / "out")]) == 1
    assert "it is the input" in capsys.readouterr().err
