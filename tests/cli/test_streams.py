"""Standard output that is closed, full or narrow, bytes that are no text, and Ctrl-C at any time."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from npu_cli import main as entry
from npu_cli.main import main


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
