"""Large inputs and outputs on a CUDA device: used where they lie while addresses recur, copied when they do not."""

from __future__ import annotations

import pytest
import torch
from torch.utils.dlpack import from_dlpack

import npu_compiler
from cuda_runtime import CUDAExecutor, CUDATensor
from npu_runtime import Device
from tests.ops.cases import case, floats

ELEMENTS = 1 << 22  # 8 MiB of float16


@pytest.fixture
def executor(device: Device) -> CUDAExecutor:
    """out = x0 + x1, for float16 tensors."""
    ir = case("add.Tensor", floats(ELEMENTS), floats(ELEMENTS)).ir(torch.float16)
    return CUDAExecutor(npu_compiler.compile(ir, target="cuda"), device)


def _tensor(value: float) -> torch.Tensor:
    return torch.full((ELEMENTS,), value, dtype=torch.float16, device="cuda")


def _run(executor: CUDAExecutor, a: torch.Tensor, b: torch.Tensor) -> CUDATensor:
    (output,) = executor.run({"x0": a, "x1": b}).values()
    return output


def _value(output: CUDATensor) -> float:
    tensor = from_dlpack(output)
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


def test_outputs_stay_wherever_the_tensors_are(executor: CUDAExecutor) -> None:
    """More addresses than there are graphs: bound where they lie at first, copied then, and bound again when known."""
    tensors = [_tensor(value) for value in range(8)]
    outputs = [_run(executor, a, b) for a in tensors for b in (tensors[1], tensors[5])]
    again = [_run(executor, tensors[0], tensors[1]) for _ in range(3)]
    assert [_value(output) for output in outputs] == [a + b for a in range(8) for b in (1, 5)]
    assert [_value(output) for output in again] == [1] * 3


def test_a_tensor_that_is_not_aligned_is_copied(executor: CUDAExecutor) -> None:
    wide = torch.full((ELEMENTS + 8,), 3.0, dtype=torch.float16, device="cuda")
    for start in (0, 1, 3, 8):
        assert _value(_run(executor, wide[start : start + ELEMENTS], _tensor(2))) == 5


def test_one_tensor_may_be_two_inputs(executor: CUDAExecutor) -> None:
    for _ in range(3):
        three = _tensor(3)
        assert _value(_run(executor, three, three)) == 6


def test_a_changed_input_is_seen(executor: CUDAExecutor) -> None:
    a, b = _tensor(1), _tensor(2)
    for step in range(6):
        torch.cuda.synchronize()
        assert _value(_run(executor, a, b)) == 3 + step
        a += 1
        torch.cuda.synchronize()


def test_recurring_addresses_take_no_memory_twice(device: Device) -> None:
    cupy = pytest.importorskip("cupy")
    ir = case("add.Tensor", floats(ELEMENTS), floats(ELEMENTS)).ir(torch.float16)
    executor = CUDAExecutor(npu_compiler.compile(ir, target="cuda"), device)
    a, b = _tensor(1), _tensor(2)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    for _ in range(6):
        assert _value(_run(executor, a, b)) == 3
    assert pool.used_bytes() - before <= 2 * ELEMENTS + 4096  # the latest output alone, which `replay` may make again


def test_a_replay_works_on_the_latest_tensors(executor: CUDAExecutor) -> None:
    a, b = _tensor(1), _tensor(2)
    output = _run(executor, a, b)
    a += 10
    torch.cuda.synchronize()
    executor.replay()
    assert _value(output) == 13
    del a, b
    for _ in range(3):
        executor.replay()
    assert _value(output) == 13
