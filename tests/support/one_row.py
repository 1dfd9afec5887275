"""Transformers of which one row of the last layer is wanted, and a check of what their programs compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import npu_compiler
from npu_compiler.artifact.plan import ExecutionPlan
from npu_compiler.graph import graph_optimizer
from npu_runtime import Device, Executor, NPUBuffer, load_weights
from tests.support.running import host_array

__all__ = ["CASES", "Case", "check", "check_smaller", "plans"]


class Layer(torch.nn.Module):
    """A layer of a transformer whose rows see those that a mask opens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)])
        self.projections = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(4)])
        self.gate, self.up = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v, out = self.projections
        normed = self.norms[0](x)
        queries, keys, values = (p(normed).unflatten(-1, (4, -1)).transpose(1, 2) for p in (q, k, v))
        attended = F.scaled_dot_product_attention(queries, keys, values, mask)
        x = x + out(attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class OneRow(torch.nn.Module):
    """A head on one row of the last layer: the first one, or one that an input names."""

    def __init__(self, width: int, named: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(width), Layer(width)])
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 40)
        self.named = named

    def forward(self, x: torch.Tensor, row: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        mask = places <= places[:, None] if self.named else None
        for layer in self.layers:
            x = layer(x, mask)
        hidden = self.norm(x)
        result: torch.Tensor = self.head(hidden[:, 0] if row is None else torch.index_select(hidden, 1, row))
        return result


@dataclass(frozen=True)
class Case:
    """A model by its sizes; `row` is the one wanted, None for the first."""

    batch: int = 1
    rows: int = 48
    width: int = 64
    row: int | None = None

    def model(self) -> OneRow:
        torch.manual_seed(0)
        return OneRow(self.width, self.row is not None).eval()

    def inputs(self) -> dict[str, torch.Tensor]:
        x = torch.randn((self.batch, self.rows, self.width), generator=torch.Generator().manual_seed(1))
        return {"x": x} | ({} if self.row is None else {"row": torch.tensor([self.row])})


CASES = {
    "class token": Case(rows=50),
    "pooled batch": Case(batch=3, rows=20),
    "last token": Case(row=47),
    "token between": Case(row=5),
    "many tokens": Case(rows=300, width=256, row=299),
}


def plans(case: Case, target: str, patch: pytest.MonkeyPatch) -> tuple[ExecutionPlan, ExecutionPlan]:
    """The plan, and the one that computes all rows."""
    ir = npu_compiler.extract(case.model(), _shaped(case)).ir
    plan = npu_compiler.compile(ir, target).main
    patch.setattr(graph_optimizer, "push_down_selections", lambda graph, launch_flops: graph)
    return plan, npu_compiler.compile(ir, target).main


def check_smaller(case: Case, target: str, patch: pytest.MonkeyPatch) -> None:
    """Less arithmetic in no more launches."""
    plan, whole = plans(case, target, patch)
    assert len(plan.calls) <= len(whole.calls)
    assert sum(call.flops for call in plan.calls) < 0.8 * sum(call.flops for call in whole.calls)


def check(case: Case, device: Device, folder: Path) -> None:
    """Compares a program's result with torch in float32."""
    model = case.model()
    npu_compiler.extract(model, _shaped(case), folder / "model.json")
    program = npu_compiler.compile(folder / "model.json", device.target)
    weights = load_weights(folder / "model.safetensors", program, device)
    given = case.inputs()
    buffers = {
        spec.name: NPUBuffer.from_numpy(host_array(given[spec.name], spec.host_dtype.numpy), device, spec=spec)
        for spec in program.input_specs
    }
    (spec,) = program.output_specs
    result = Executor(program, device).run(buffers, weights)[spec.name].to_numpy(spec).astype(np.float32)
    row = given.get("row")
    with torch.no_grad():
        expected = model(given["x"], None if row is None else row % case.rows).numpy()
    assert result.shape == expected.shape
    assert np.corrcoef(result.reshape(-1), expected.reshape(-1))[0, 1] > 0.9999
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-2 * float(np.abs(expected).max()))


def _shaped(case: Case) -> Mapping[str, torch.Tensor]:
    """Inputs to extract the model with, which an index from the end is no part of."""
    return {name: tensor.clamp(min=0) if name == "row" else tensor for name, tensor in case.inputs().items()}
