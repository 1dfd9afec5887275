"""Quotients and powers of e: those of activations may miss last places, a model's own may not."""

from __future__ import annotations

import numpy as np
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


def test_powers_of_e_behind_a_product_that_is_stored_in_16_bits_are_short() -> None:
    graph = CUDAGraph(torch.bfloat16)
    product = graph.call("mm", graph.input(128, 64), graph.input(64, 128))
    program = graph.compile(graph.call("silu", product))
    assert all("= short_exp(" in kernel.text for kernel in program.main.kernels)


def test_a_power_of_e_alone_is_not_short() -> None:
    graph = CUDAGraph(torch.bfloat16)
    [kernel] = graph.compile(graph.call("exp", graph.input(64))).main.kernels
    assert "= exp(" in kernel.text
    assert "= short_exp(" not in kernel.text


def test_the_exponent_of_a_short_power_is_rounded_to_what_is_said() -> None:
    """The instruction itself misses 2^-22 of its result."""
    exponents = np.linspace(-87, 88, 200_001).astype(np.float32)
    powers = np.exp2((exponents * np.float32(1.44269504)).astype(np.float64))
    assert np.abs(powers / np.exp(exponents.astype(np.float64)) - 1).max() < 2.0**-17 - 2.0**-22
