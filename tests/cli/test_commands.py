"""The commands of `npu`, as a user types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from npu_cli.images import photograph
from npu_cli.main import main
from npu_compiler import CompiledProgram
from npu_compiler.errors import ProgramFormatError


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys, npu_cli.main, npu_cli.parser; npu_cli.parser.build_parser().format_help(); "
        "print(*{'numpy', 'rich', 'torch', 'npu_compiler'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


def test_the_compiler_imports_no_torch() -> None:
    script = "import sys, npu_compiler; print(*{'torch', 'torch_ir', 'npu_runtime', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("line", [[], ["compile"], ["nonsense"], ["run", "x.npubin", "--top", "0"]])
def test_wrong_command_line(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(line)
    assert exit_.value.code == 2
    assert "usage: npu" in capsys.readouterr().err


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "missing.npubin"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: cannot read 'missing.npubin'")
    assert captured.err.count("\n") == 1


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ProgramFormatError):
        main(["--debug", "describe", "missing.npubin"])


def test_compile(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "other.npubin"
    assert main(["compile", str(folder / "tiny.json"), "-o", str(output), "--dtype", "bfloat16"]) == 0
    assert CompiledProgram.load(output).compute_dtype == "bfloat16"
    assert f"{output}: tiny for metal in bfloat16" in capsys.readouterr().out


def test_compile_of_a_file_that_is_not_ir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.json").write_text("{")
    assert main(["compile", str(tmp_path / "broken.json")]) == 1
    assert "is not JSON" in capsys.readouterr().err
    assert not (tmp_path / "broken.npubin").exists()


def test_describe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", str(folder / "tiny.npubin")]) == 0
    assert "tiny" in capsys.readouterr().out


def run(folder: Path, *options: str) -> int:
    return main(["run", str(folder / "tiny.npubin"), *options])


def test_run_on_an_array(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 3, 32, 32), np.float32))
    weights, given = str(folder / "tiny.safetensors"), f"input={tmp_path / 'x.npy'}"
    assert run(folder, "--weights", weights, "--input", given, "--top", "3", "--output", str(tmp_path / "out")) == 0
    (written,) = (tmp_path / "out").iterdir()
    logits = np.load(written)
    assert logits.shape == (1, 10)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[1:4]] == np.argsort(-logits[0])[:3].tolist()


def test_run_on_a_photograph(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--weights", str(folder / "tiny.safetensors"), "--input", f"input={photograph()}") == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "input 'input' is missing; add --input input=FILE"),
        (["--input", "x.npy"], "expected NAME=FILE with NAME one of input"),
        (["--input", "other=x.npy"], "expected NAME=FILE with NAME one of input"),
        (["--input", "input=missing.npy"], "cannot read 'missing.npy': No such file or directory; give the"),
        (["--input", "input=several.npz"], "given 'several.npz', which holds arrays by name"),
        (["--input", "input=missing.jpg"], "cannot read 'missing.jpg' as an image"),
        (["--input", "input={folder}/tiny.json"], "as an image"),
        (["--input", "input={folder}/wrong.npy"], "given an array of shape (2, 3), expected (1, 3, 32, 32)"),
    ],
)
def test_wrong_inputs(given: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(folder / "wrong.npy", np.ones((2, 3), np.float32))
    options = [option.format(folder=folder) for option in given]
    assert run(folder, "--weights", str(folder / "tiny.safetensors"), *options) == 1
    assert expected in capsys.readouterr().err


def test_weights_are_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--input", f"input={photograph()}") == 1
    assert "add --weights W.safetensors" in capsys.readouterr().err


def test_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NPU_CACHE_DIR", str(tmp_path))  # nothing that other programs left
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for subject in (
        "device software-metal",
        "process of the software GPU",
        "kernel cache of CUDA",
        "tuning results",
        "extra torch",
    ):
        assert subject in shown
    assert "as loops that are vectorised" in " ".join(shown.split())


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--weights", "seeded", "--output", str(tmp_path / "demo")]) == 0
    shown = capsys.readouterr().out
    for text in ("the same five classes", "Pearson r", "kernels launched", "seeded, BatchNorm statistics"):
        assert text in shown
    names = sorted(path.name for path in (tmp_path / "demo").iterdir())
    assert names == ["resnet18.json", "resnet18.npubin", "resnet18.safetensors"]
