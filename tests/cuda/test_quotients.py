"""Quotients: those of activations may miss the last place, a model's own division may not."""

from __future__ import annotations

import pytest
import torch

from npu_runtime import Device
from tests.cuda.test_matvec import CUDAGraph

ACTIVATIONS = ("sigmoid", "silu")
_UNITS = 2.0**23  # in the last place, of one


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_activations_miss_two_units(op: str, device: Device) -> None:
    """Multiplied by their divisor again, in the same kernel, as what is stored is rounded to half precision."""
    graph = CUDAGraph(torch.bfloat16)
    values = torch.linspace(-80, 80, 512, dtype=torch.float64)
    x = graph.call("to.dtype", graph.input(512, data=values), torch.float32)
    divisor = graph.call("add.Tensor", graph.call("exp", graph.call("neg", x)), 1.0)
    product = graph.call("mul.Tensor", graph.call(op, x), divisor)
    missed = graph.call("sub.Tensor", product, x if op == "silu" else 1.0)
    program = graph.compile(graph.call("mul.Tensor", missed, _UNITS))
    [found] = graph.run(program, device)
    assert len(program.main.calls) == 1
    assert 0 < (found / (values if op == "silu" else 1)).abs().max() <= 3


@pytest.mark.parametrize(("op", "operands"), [*((op, 1) for op in ACTIVATIONS), ("div.Tensor", 2)])
def test_a_models_own_division_does_without(op: str, operands: int) -> None:
    graph = CUDAGraph(torch.float16)
    [kernel] = graph.compile(graph.call(op, *(graph.input(64) for _ in range(operands)))).main.kernels
    assert ("= quotient(" in kernel.text) == (op in ACTIVATIONS)
