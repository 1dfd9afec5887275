"""What the tests of public calls share: a model of a few nodes, extracted and compiled once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import npu_compiler
from npu_compiler import CompiledProgram
from npu_compiler.frontend.extraction import Extraction
from npu_compiler.partitioner import PartitionPlan
from npu_runtime import Device


class Small(torch.nn.Module):
    """Takes `x` [2, 8] and gives a linear layer's ReLU [2, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x).relu()
        return result


class Mixed(Small):
    """The same with a product that no target has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.special.i1e(super().forward(x))
        return result


@dataclass(frozen=True)
class Made:
    """A model in all its forms."""

    module: torch.nn.Module
    extraction: Extraction
    program: CompiledProgram
    mixed: PartitionPlan
    folder: Path
    x: NDArray[Any]

    @property
    def expected(self) -> NDArray[Any]:
        with torch.no_grad():
            result: NDArray[Any] = self.module(torch.from_numpy(self.x)).numpy()
        return result


@pytest.fixture(scope="session")
def device() -> Device:
    return Device("software-metal")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(0)
    module, folder = Small().eval(), tmp_path_factory.mktemp("small")
    extraction = npu_compiler.extract(module, torch.zeros(2, 8), folder / "small.json")
    program = npu_compiler.compile(folder / "small.json")
    program.save(folder / "small.npubin")
    mixed = Mixed().eval()
    mixed.load_state_dict(module.state_dict())
    plan = npu_compiler.partition(npu_compiler.extract(mixed, torch.zeros(2, 8)).ir)
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    return Made(module, extraction, program, plan, folder, x)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo keeps what it compiled by the code of functions.

    And it empties the processor's caches, for 30 ms, to time the checks of each graph for its log.
    """
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *given: 0.0, raising=False)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
    torch._dynamo.reset()
