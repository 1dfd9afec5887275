"""Recurrent layers as models hold them, exported, run, and compared with the module in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import npu_compiler
import npu_runtime


class Packed(nn.Module):
    """A layer over sequences of several lengths."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(pack_padded_sequence(x, torch.tensor([3, 2])))[1]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_are_refused_with_their_reason(kind: type[nn.Module]) -> None:
    extraction = npu_compiler.extract(Packed(kind(4, 5)).eval(), (torch.zeros(3, 2, 4),))
    (node,) = (node for node in extraction.ir["nodes"] if node["op_type"].endswith(".data"))
    support = npu_compiler.is_op_supported(node)
    assert not support
    assert "a packed sequence" in support.reason


MODULES = [
    (nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True), (2, 5, 8)),
    (nn.LSTM(8, 6, proj_size=4), (5, 8)),
    (nn.GRU(8, 6, num_layers=2, batch_first=True), (5, 8)),
    (nn.RNN(8, 6, bidirectional=True), (4, 3, 8)),
    (nn.LSTMCell(8, 6), (3, 8)),
    (nn.GRUCell(8, 6), (8,)),
]


@pytest.mark.parametrize(("module", "shape"), MODULES, ids=lambda value: repr(value)[:40])
def test_modules_that_begin_with_zeros(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    extraction = npu_compiler.extract(module.eval(), (x,))
    program = npu_compiler.compile(extraction.ir, "metal")
    results = _flat(npu_runtime.load(program, extraction.weights, "software-metal")(x))
    with torch.no_grad():
        expected = _flat(module.double()(x.double()))
    module.float()
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-2, atol=3e-3)


def _flat(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else [part for each in results for part in _flat(each)]
