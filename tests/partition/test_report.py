"""A plan as text and on the command line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from npu_cli.commands import partition as command
from npu_cli.main import main
from npu_compiler import extract, partition
from tests.support.extraction import Function

REPORT = """\
Function for metal: 6 nodes, 3 on the device in 2 partitions, 3 on the CPU in 1, 32.0 KiB moved in 4 transfers
partitions: 3
  0: device, 1 node (1 aten.matmul.default)
     reads args_0; gives matmul
  1: CPU, 3 nodes (2 <built-in function getitem>, 1 aten.linalg_qr.default)
     reads matmul; gives getitem, getitem_1
  2: device, 2 nodes (1 aten.matmul.default, 1 aten.add.Tensor)
     reads getitem, args_0, matmul; gives add
transfers: 4, 32.0 KiB
  to device args_0, 8.0 KiB, input -> 0, 2
  to CPU matmul, 8.0 KiB, 0 -> 1
  to device getitem, 8.0 KiB, 1 -> 2
  to CPU add, 8.0 KiB, 2 -> output
on the CPU: 3 nodes
  linalg_qr (aten.linalg_qr.default): no definition of this op is registered
  getitem, getitem_1 (<built-in function getitem>): it costs nothing where its operand is, and 'linalg_qr' \
runs on the CPU
what that costs: 0.056 ms a run, estimated, and 16.0 KiB that cross
  0.056 ms, 16.0 KiB: linalg_qr (aten.linalg_qr.default) and 2 nodes with them
     way out: define aten.linalg_qr.default (see CONTRIBUTING.md); alone it \
brings 3 nodes back and saves 8.0 KiB
"""


def rotated_product(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    product = x @ x
    rotation, upper = torch.linalg.qr(product)
    return rotation @ x + product, upper


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "mixed.json"
    extract(Function(rotated_product), (torch.zeros(64, 64),), path)
    return path


def test_the_report(path: Path) -> None:
    assert partition(path).report() == REPORT


def test_the_command_into_a_file(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", str(path)]) == 0
    assert capsys.readouterr().out == REPORT


def test_the_command_on_a_terminal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        command, "Console", lambda **options: Console(file=screen, force_terminal=True, width=140, color_system=None)
    )
    assert main(["partition", str(path), "--target", "metal"]) == 0
    shown = screen.getvalue()
    for cell in (
        "runs on",
        "2 <built-in function getitem>, 1 aten.linalg_qr.default",
        "to device",
        "0 -> 1",
        "8.0 KiB",
    ):
        assert cell in shown
    assert "no definition of this op is registered" in shown


def test_errors_are_one_line(tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", str(tmp_path / "none.json")]) == 1
    assert "cannot read" in capsys.readouterr().err
    assert main(["partition", str(path), "--target", "tpu"]) == 1
    assert "given the target 'tpu'" in capsys.readouterr().err


def test_a_model_that_fits_whole() -> None:
    report = partition(extract(Function(lambda x: torch.relu(x)), (torch.zeros(4),)).ir).report()
    assert "1 node, 1 on the device in 1 partition, 0 on the CPU in 0" in report
    assert report.endswith("on the CPU: 0 nodes\n")
