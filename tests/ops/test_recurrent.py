"""Recurrent layers as models hold them, exported, run, and compared with the module in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import npu_compiler
import npu_runtime


def _tensor(name: str, shape: tuple[int, ...], dtype: str = "float32") -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": dtype}


@pytest.mark.parametrize(("kind", "gates", "states"), [("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1)])
def test_packed_sequences_are_refused_with_their_reason(kind: str, gates: int, states: int) -> None:
    given = [_tensor(f"state{number}", (1, 2, 5)) for number in range(states)]
    weights = [_tensor("w", (gates * 5, 4)), _tensor("u", (gates * 5, 5))]
    node = {
        "name": "packed",
        "op_type": f"aten.{kind}.data",
        "inputs": [_tensor("data", (5, 4)), _tensor("sizes", (3,), "int64"), *given, *weights],
        "outputs": [_tensor("packed_0", (5, 5)), *(_tensor(f"packed_{n + 1}", (1, 2, 5)) for n in range(states))],
        "attrs": {
            "_tensor_list_sizes": [2, 2] if states == 2 else [2], "has_biases": False, "num_layers": 1, "dropout": 0.0,
            "train": False, "bidirectional": False,
        },
    }  # fmt: skip
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
