"""No command writes over what it reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from npu_cli.main import main
from npu_compiler import extract
from npu_compiler.errors import ExtractionError


@pytest.fixture
def copies(folder: Path, tmp_path: Path) -> Path:
    """The classifier's files, to be destroyed."""
    shutil.copytree(folder, tmp_path / "copies")
    return tmp_path / "copies"


@pytest.mark.parametrize("output", ["tiny.json", "link.json", "tiny.safetensors"])
def test_compile_over_its_ir_or_its_weights(output: str, copies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copies / "link.json").symlink_to(copies / "tiny.json")
    before = (copies / output).read_bytes()
    assert main(["compile", str(copies / "tiny.json"), "-o", str(copies / output)]) == 1
    assert "it is the input" in capsys.readouterr().err
    assert (copies / output).read_bytes() == before


def test_run_over_its_input(copies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (name,) = _output_names(copies, tmp_path)
    given = copies / f"{name}.npy"
    np.save(given, np.ones((1, 3, 32, 32), np.float32))
    line = ["run", str(copies / "tiny.npubin"), "--weights", str(copies / "tiny.safetensors"), "-i", f"input={given}"]
    assert main([*line, "-o", str(copies)]) == 1
    assert "it is the input" in capsys.readouterr().err
    assert np.load(given).shape == (1, 3, 32, 32)


def _output_names(folder: Path, tmp_path: Path) -> list[str]:
    np.save(tmp_path / "x.npy", np.ones((1, 3, 32, 32), np.float32))
    line = ["run", str(folder / "tiny.npubin"), "--weights", str(folder / "tiny.safetensors")]
    assert main([*line, "-i", f"input={tmp_path / 'x.npy'}", "-o", str(tmp_path / "out")]) == 0
    return [path.stem for path in (tmp_path / "out").iterdir()]


def test_extract_over_the_weights_beside_the_ir(tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match=r"where its weights go; give a path ending in \.json"):
        extract(torch.nn.ReLU(), torch.zeros(1), tmp_path / "m.safetensors")
    with pytest.raises(ExtractionError, match="a folder"):
        extract(torch.nn.ReLU(), torch.zeros(1), "")
    assert list(tmp_path.iterdir()) == []
