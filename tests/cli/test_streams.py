"""Standard output that is closed, full or narrow, bytes that are no text, and Ctrl-C at any time."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from npu_cli import main as entry
from npu_cli.main import main
from tests.compiler.test_reader import small
from tests.runtime.plans import axpy_program


def npu(line: str, redirection: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `npu` in a shell."""
    command = f'"{sys.executable}" -m npu_cli {line} {redirection}'
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(("redirection", "reason"), [(">&-", "is closed"), (">/dev/full", "No space left on device")])
@pytest.mark.parametrize("line", ["--version", "describe {folder}/tiny.npubin"])
def test_standard_output_that_takes_nothing(line: str, redirection: str, reason: str, folder: Path) -> None:
    done = npu(line.format(folder=folder), redirection)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert reason in done.stderr


def test_a_reader_that_has_enough(folder: Path) -> None:
    done = npu(f"describe {folder}/tiny.npubin", "| head -n 1")
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_closed_standard_error(folder: Path) -> None:
    assert npu("describe missing.npubin", "2>&-").returncode == 1


def test_an_encoding_without_the_character(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    path = folder / "모델.npubin"
    assert main(["compile", str(folder / "tiny.json"), "-o", str(path)]) == 0
    narrow.flush()
    assert rb"\ubaa8\ub378.npubin: tiny for metal" in narrow.buffer.getvalue()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_of_strangers_do_nothing_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = "\x1b]0;title\x07\x9b2J\r[/red]\x1b[31mn"
    path = tmp_path / "stranger.npubin"
    program = replace(axpy_program(), model=name)
    program.save(path)
    monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
    assert main(["describe", str(path)]) == 0
    assert r"program \x1b]0;title\x07\x9b2J\x0d[/red]" + "\x1b[31mn\n" in terminal.getvalue()
    assert main(["describe", f"{tmp_path}/{name}"]) == 1
    assert not {"\x07", "\x9b", "\r"} & set(capsys.readouterr().err)
    terminal.truncate(0)
    ir = json.loads(json.dumps(small()).replace("act", "[/red]\\u001b[2J"))
    (tmp_path / "ir.json").write_text(json.dumps(ir))
    assert main(["partition", str(tmp_path / "ir.json")]) == 0
    monkeypatch.setattr(sys, "stdout", plain := io.StringIO())
    assert main(["describe", str(path)]) == 0
    assert name in plain.getvalue()  # what reads it is no terminal


def test_a_prompt_that_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "model", "--prompt", "\udcff"])
    assert exit_.value.code == 2
    assert "--prompt: given '\\udcff', expected text in UTF-8" in capsys.readouterr().err


def test_an_interrupt_during_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "import_module", interrupted)
    assert main(["doctor"]) == 130


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("a defect")

    monkeypatch.setattr(entry, "import_module", broken)
    with pytest.raises(OSError, match="a defect"):
        main(["doctor"])
