"""A small classifier, extracted once for all tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from npu_cli.main import main
from npu_compiler import extract


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds ``tiny.json``, ``tiny.safetensors`` and ``tiny.npubin``: input ``input`` [1, 3, 32, 32], ten classes."""
    place = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 15 * 15, 10)
    )
    extract(model.eval(), torch.zeros(1, 3, 32, 32), place / "tiny.json", model_name="tiny")
    assert main(["compile", str(place / "tiny.json")]) == 0
    return place
