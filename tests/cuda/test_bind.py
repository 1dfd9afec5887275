"""Executors bound to memory that the caller owns: calls that only replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import npu_compiler
from cuda_runtime import CUDAExecutor
from npu_compiler.errors import InputError
from npu_runtime import Device, NPUBuffer
from tests.ops.cases import case, floats

SHAPE = (4, 8, 16, 16)


@pytest.fixture
def executor(device: Device) -> CUDAExecutor:
    """out = x0 + x1, for float16 tensors."""
    ir = case("add.Tensor", floats(*SHAPE), floats(*SHAPE)).ir(torch.float16)
    return CUDAExecutor(npu_compiler.compile(ir, target="cuda"), device)


@pytest.fixture
def torch_tensor(executor: CUDAExecutor) -> Callable[[], Any]:
    """Makes a tensor of torch that lies as the program's tensors do."""
    strides = executor.plan.inputs[0].layout.strides
    return lambda: torch.empty_strided(SHAPE, strides, dtype=torch.float16, device="cuda")


def test_buffers_are_read_and_written_where_they_lie(executor: CUDAExecutor, device: Device) -> None:
    specs = {spec.name: spec for spec in executor.plan.inputs}
    (made,) = executor.plan.outputs
    inputs = {name: NPUBuffer.from_numpy(np.zeros(SHAPE, np.float16), device, spec) for name, spec in specs.items()}
    result = NPUBuffer.from_numpy(np.zeros(SHAPE, np.float16), device, made)
    step = executor.bind(inputs, {made.name: result})
    for number in range(6):
        device.backend.write(np.full(SHAPE, number, np.float16), specs["x0"], inputs["x0"].data)
        step(sync=number % 2 == 0)
        assert (result.to_numpy() == number).all()


def test_tensors_of_torch_with_its_own_stream(executor: CUDAExecutor, torch_tensor: Callable[[], Any]) -> None:
    a, b, out = torch_tensor(), torch_tensor(), torch_tensor()
    name = executor.plan.outputs[0].name
    step = executor.bind({"x0": a, "x1": b}, {name: out})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(200):
            a.fill_(number % 50)
            b.fill_(1)
            step(stream=stream)
            a.add_(out)
            assert bool((a == 2 * (number % 50) + 1).all())


def test_what_does_not_lie_so_is_refused(executor: CUDAExecutor, torch_tensor: Callable[[], Any]) -> None:
    name = executor.plan.outputs[0].name
    a, b, out = torch_tensor(), torch_tensor(), torch_tensor()
    with pytest.raises(InputError, match="input 'x0': given a tensor that lies in memory as no float16"):
        executor.bind({"x0": a.transpose(2, 3), "x1": b}, {name: out})
    with pytest.raises(InputError, match="input 'x0': given a tensor that lies in memory as no float16"):
        executor.bind({"x0": a.float(), "x1": b}, {name: out})
    with pytest.raises(InputError, match=f"output '{name}': given the memory of input 'x1'"):
        executor.bind({"x0": a, "x1": b}, {name: b})
    with pytest.raises(InputError, match="input 'x0': given a ndarray"):
        executor.bind({"x0": np.zeros(SHAPE, np.float16), "x1": b}, {name: out})


def test_memory_that_overlaps_in_part_is_refused(device: Device) -> None:
    ir = case("add.Tensor", floats(64), floats(64)).ir(torch.float16)
    executor = CUDAExecutor(npu_compiler.compile(ir, target="cuda"), device)
    name = executor.plan.outputs[0].name
    memory = torch.zeros(160, dtype=torch.float16, device="cuda")
    a, b = memory[:64], memory[96:]
    for begin, fits in ((0, False), (63, False), (64, True), (96, False)):
        out = {name: memory[begin : begin + 64]} if not fits else {name: memory[64:96].repeat(2)}
        inputs = {"x0": a, "x1": b}
        if fits:
            executor.bind(inputs, out)()
            executor.run(inputs, outputs={name: _buffer(out[name], device, executor)})
            continue
        with pytest.raises(InputError, match="memory of its own"):
            executor.bind(inputs, out)
        with pytest.raises(InputError, match="memory of its own"):
            executor.run(inputs, outputs={name: _buffer(out[name], device, executor)})


def _buffer(tensor: Any, device: Device, executor: CUDAExecutor) -> NPUBuffer:
    from cuda_runtime import CUDATensor

    shared = CUDATensor.sharing(tensor, device, executor.plan.outputs[0])
    assert shared is not None
    return shared


def test_replaying_costs_little(executor: CUDAExecutor, torch_tensor: Callable[[], Any]) -> None:
    from time import perf_counter

    step = executor.bind({"x0": torch_tensor(), "x1": torch_tensor()}, {executor.plan.outputs[0].name: torch_tensor()})
    step()
    times = []
    for _ in range(20):
        started = perf_counter()
        for _ in range(100):
            step(sync=False)
        times.append((perf_counter() - started) / 100)
        torch.cuda.synchronize()
    assert min(times) < 15e-6
