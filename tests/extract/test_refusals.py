"""What extraction refuses, and that it says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from npu_compiler.errors import ExtractionError, MissingDependencyError
from npu_compiler.frontend import extraction
from npu_compiler.frontend.extraction import extract
from tests.support.extraction import Function, check_computes, nodes_of


class Counter(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.count.add_(1)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.BatchNorm1d(3).train(), "training mode"),
        (nn.Sequential(nn.ReLU(), nn.Dropout().train()).requires_grad_(False), "training mode"),
        (nn.Linear(3, 3, device="meta").eval(), "'weight' is on the meta device"),
        (Counter().eval(), "its own tensor 'count'"),
        (Function(lambda x: x.nonzero()), "known only when the model runs"),
        (Function(lambda x: x[x > 0]), "known only when the model runs"),
        (Function(lambda x: x if x.sum() > 0 else -x), "torch.where"),
        (Function(lambda x: x * x.sum().item()), "known only when the model runs"),
        (Function(lambda x: x if x.sum() > 0 else -x), r"at line \d+ of test_refusals.py: `\(Function\(lambda x: x if"),
        (Function(lambda x: (x, Counter())), "<class '.*Counter'> in output.* leave the object out of the result"),
        (Function(lambda x: x @ torch.ones(7)), "cannot trace Function"),
        (Function(lambda x: x * torch.tensor(1j)), "complex"),
        (Function(lambda x: x.view(3, 1).add_(1)), "changes its input 'args_0' in place"),
        (torch.relu, "expected a torch.nn.Module"),
    ],
)
def test_refused(model: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match=expected):
        extract(model, torch.ones(2, 3) if "BatchNorm" in str(model) else torch.ones(3), tmp_path / "model.json")
    assert not list(tmp_path.iterdir())


def test_example_inputs_of_another_kind() -> None:
    with pytest.raises(ExtractionError, match="expected a tuple of positional arguments"):
        extract(nn.ReLU().eval(), 3)  # type: ignore[arg-type]


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match="choose a folder that exists"):
        extract(nn.ReLU().eval(), torch.ones(3), tmp_path / "nowhere" / "model.json")


def test_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"npu-compiler\[torch\]"):
        extract(nn.ReLU().eval(), torch.ones(3))


def view_taken_before(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    view = y[0]
    y.mul_(2)
    return view


def write_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[0] = 7.0
    return y


def later_use_of_the_result(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y.mul_(2)
    return y + y.relu_()


@pytest.mark.parametrize("function", [view_taken_before, write_through_a_view, later_use_of_the_result])
def test_in_place_operations_keep_their_meaning(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check_computes(Function(function), (torch.randn(3, 2),))


def test_harmless_in_place_operations_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval()
    extraction = check_computes(model, (torch.randn(1, 3, 4, 4),))
    assert nodes_of(extraction, "aten.batch_norm.default")
    assert nodes_of(extraction, "aten.relu_.default")


def test_input_changed_in_place_and_returned() -> None:
    def forward(cache: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache.index_copy_(0, torch.tensor([1]), row)
        return cache, cache.sum()

    extraction = extract(Function(forward), (torch.zeros(4, 3), torch.ones(1, 3)))
    assert extraction.ir["graph_outputs"][0]["name"] == "index_copy_"
