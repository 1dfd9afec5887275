"""Rows of any number through a model of a fixed batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from npu_compiler.errors import InputError
from npu_model.batches import ModelBatches

DEVICE = "software-metal"


class Pair(torch.nn.Module):
    """Two inputs, two outputs, one of them in bfloat16."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"sum": x + y, "rest": [(x * 2).to(torch.bfloat16)]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair") / "pair.json"
    npu_compiler.extract(Pair().eval(), {"x": torch.zeros(4, 3), "y": torch.zeros(4, 3)}, path)
    return path


@pytest.mark.parametrize("count", [0, 1, 4, 5, 11])
def test_every_row_goes_through_once(pair: Path, count: int, rng: np.random.Generator) -> None:
    batches = ModelBatches(pair, device=DEVICE, columns={"y": "other"}, into=["sum", "double"])
    x, y = rng.standard_normal((2, count, 3)).astype(np.float32)
    x.flags.writeable = False  # as Ray's store of objects gives them
    result = batches({"x": x, "other": y, "name": np.arange(count)})
    assert list(result) == ["name", "sum", "double"]
    assert result["sum"].shape == (count, 3)
    np.testing.assert_allclose(result["sum"], x + y, atol=1e-2)
    assert result["double"].dtype == np.float32
    np.testing.assert_allclose(result["double"], x * 2, rtol=1e-2, atol=1e-2)


def test_columns_of_arrays_are_stacked(pair: Path) -> None:
    rows = np.empty(2, object)
    rows[:] = [np.ones(3, np.float32), np.zeros(3, np.float32)]
    result = ModelBatches(pair, device=DEVICE)({"x": rows, "y": list(rows)})
    assert result.keys() == {spec.name for spec in npu_compiler.compile(pair).main.outputs}
    assert next(iter(result.values())).tolist() == [[2, 2, 2], [0, 0, 0]]


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({"columns": {"z": "x"}}, {}, "given a column for 'z', expected x, y"),
        ({"into": ["sum"]}, {}, "given 1 columns for 2 outputs"),
        ({}, {"x": np.zeros((1, 3), np.float32)}, "no column 'y', it has x"),
        ({}, {"x": np.zeros((1, 4), np.float32), "y": np.zeros((1, 3), np.float32)}, "x"),
    ],
)
def test_what_does_not_fit_is_refused(pair: Path, options: Any, batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelBatches(pair, device=DEVICE, **options)(batch)


def test_models_without_a_batch_are_refused(tmp_path: Path) -> None:
    npu_compiler.extract(torch.nn.Flatten(0).eval(), torch.zeros(2, 3), tmp_path / "flat.json")
    with pytest.raises(InputError, match=r"takes no batch.*\[2, 6\]"):
        ModelBatches(tmp_path / "flat.json", device=DEVICE)
