"""`npu run` on IR, whole or divided, and what is said of models that do not lower whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from npu_cli.main import main
from npu_compiler import extract


class Mixed(torch.nn.Module):
    """What no target lowers, twice over, between products."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.special.i1e(self.linear(x) * 0.01)
        result: torch.Tensor = torch.special.i1e(y) + torch.special.log_ndtr(self.linear(y))
        return result


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """IR ``mixed.json`` with its weights, an input ``x.npy`` and the result ``expected.npy``."""
    place = tmp_path_factory.mktemp("mixed")
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.rand(64, 64)
    extract(model, {"x": x}, place / "mixed.json")
    np.save(place / "x.npy", x.numpy())
    with torch.no_grad():
        np.save(place / "expected.npy", model(x).numpy())
    return place


def run(folder: Path, *options: str) -> int:
    given = ["--weights", f"{folder}/mixed.safetensors", "-i", f"x={folder}/x.npy"]
    return main(["run", f"{folder}/mixed.json", *given, *options])


def test_ir_is_compiled_and_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 3, 32, 32), np.float32))
    shown = []
    for name in ("tiny.json", "tiny.npubin"):
        given = ["--weights", str(folder / "tiny.safetensors"), "-i", f"input={tmp_path / 'x.npy'}"]
        assert main(["run", str(folder / name), *given, "--device", "software-metal"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_what_does_not_lower_runs_on_the_cpu(mixed: Path, tmp_path: Path) -> None:
    assert run(mixed, "--partition", "-o", str(tmp_path)) == 0
    (path,) = tmp_path.iterdir()
    np.testing.assert_allclose(np.load(path), np.load(mixed / "expected.npy"), atol=5e-3)


def test_the_ledger_of_a_divided_model(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(mixed, "--partition", "--ledger") == 0
    assert "a run, measured, and" in capsys.readouterr().out
    assert run(mixed, "--ledger") == 1
    assert "given --ledger without --partition" in capsys.readouterr().err


def test_weights_are_asked_for(mixed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"{mixed}/mixed.json", "-i", f"x={mixed}/x.npy", "--partition"]) == 1
    assert "add --weights W.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compile", "run"])
def test_every_refusal_is_listed_with_the_way_out(
    command: str, mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (main(["compile", f"{mixed}/mixed.json"]) if command == "compile" else run(mixed)) == 1
    shown = capsys.readouterr().err
    assert "2 ops cannot be compiled" in shown
    assert "aten.special_i1e.default (special_i1e, special_i1e_1): " in shown
    assert "aten.special_log_ndtr.default (special_log_ndtr): " in shown
    assert f"`npu run {mixed}/mixed.json --partition` runs such nodes on the CPU" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tiny.npubin", "--partition"], "which is compiled as a whole; give the IR.json instead"),
        (["tiny.json", "--partition", "--tune"], "expected one of them"),
    ],
)
def test_options_that_contradict_each_other(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folder / options[0]), *options[1:]]) == 1
    assert message in capsys.readouterr().err


def test_waiting_is_shown_on_a_terminal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 3, 32, 32), np.float32))
    line = ["run", str(folder / "tiny.npubin"), "--weights", str(folder / "tiny.safetensors")]
    assert main([*line, "-i", f"input={tmp_path / 'x.npy'}"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    assert main([*line, "-i", f"input={tmp_path / 'x.npy'}"]) == 0
    assert "preparing the kernels" in capsys.readouterr().err
