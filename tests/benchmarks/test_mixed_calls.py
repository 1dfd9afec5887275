"""What a mixed plan costs on the host: the benchmark runs, and a call does little that is not the model's."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch

import npu_compiler
from benchmarks import mixed_calls
from npu_runtime import DAGExecutor, Device

_MOST_A_PARTITION, _MOST_A_TRANSFER = 80, 55  # calls of functions: 52 and 38, with room for what others may need


@pytest.fixture(scope="module")
def device() -> Device:
    return Device("software-metal")


def test_the_benchmark_runs(device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    measured = mixed_calls._Measured(mixed_calls.Chain(1, 2), device)
    measured.run(3)
    row = measured.row()
    assert (row["partitions"], row["transfers"]) == (3, 8)
    assert row["allowed"] == 30 * 3 + 10 * 8
    assert "3 partitions,   8 transfers:" in capsys.readouterr().out


@pytest.mark.parametrize("width", [1, 4])
def test_a_call_takes_few_calls_of_functions(width: int, device: Device) -> None:
    """Microseconds on a machine with other work say little; how many functions Python calls says much of them."""
    tensors = [torch.randn(8, 64) for _ in range(width)]
    extraction = npu_compiler.extract(mixed_calls.Chain(3, width).eval(), tuple(tensors))
    plan = npu_compiler.partition(extraction.ir, lambda op: op != "aten.sigmoid.default", target=device.target)
    executor = DAGExecutor(plan, device)
    executor.load_weights(extraction.weights)
    inputs = {spec.name: tensor.numpy() for spec, tensor in zip(plan.inputs, tensors, strict=True)}
    executor.execute(inputs)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        executor.execute(inputs)
    finally:
        sys.setprofile(None)
    assert calls <= _MOST_A_PARTITION * len(plan.partitions) + _MOST_A_TRANSFER * len(plan.transfers)
