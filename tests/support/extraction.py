"""Extracts models and checks that the IR, through JSON, computes what the model computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch_ir import IR, IRExecutor

from npu_compiler.frontend.extraction import Extraction, extract

__all__ = ["Function", "check_computes", "nodes_of", "run_ir"]


def nodes_of(extraction: Extraction, op: str) -> list[dict[str, Any]]:
    return [node for node in extraction.ir["nodes"] if node["op_type"] == op]


def check_computes(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Extraction:
    """Extracts `model` and compares the IR with it, through JSON."""
    extraction = extract(model, inputs)
    ir = json.loads(json.dumps(extraction.ir))
    with torch.no_grad():
        expected = model(*inputs)
    expected = (expected,) if isinstance(expected, torch.Tensor) else expected
    for given, wanted in zip(run_ir(ir, extraction.weights, inputs), expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)
    return extraction


class Function(nn.Module):
    """A module without weights around a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def run_ir(
    ir: Mapping[str, Any], weights: Mapping[str, torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Executes `ir` with `weights` by name. Its attributes become torch objects first, as the executor wants them."""
    program = IR.from_dict(dict(ir))
    for node in program.nodes:
        for key, kind in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format)):
            value = getattr(torch, str(node.attrs.get(key)), None)
            if isinstance(value, kind):
                node.attrs[key] = value
    with torch.no_grad():
        outputs: tuple[torch.Tensor, ...] = IRExecutor(program, weights=dict(weights)).execute(inputs)
    return outputs
